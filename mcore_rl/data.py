"""Rows of prompts and of prompt/response pairs, read from JSONL or parquet and turned into token ids; their order over epochs.

All users of a prompt (length filter, engine, training, evaluation) take `Row.prompt_ids`: it is made in one place.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from mcore_rl.config.sections import DataConfig
from mcore_rl.readers import BadRow, read_rows
from mcore_rl.tokens import encode_prompt, encode_response
from parallel.errors import UserError, nearest

_SHOWN = 10  # bad rows listed in a message


@dataclass(frozen=True)
class Row:
    """One prompt. `index` counts the rows of the source from 0; `fields` is the whole row as read."""

    index: int
    prompt_ids: tuple[int, ...]
    prompt_text: str
    answer: str | None
    fields: dict[str, Any] = field(repr=False, default_factory=dict)


@dataclass(frozen=True)
class SftExample:
    """One prompt with its response: `token_ids` [tokens] and `mask` [tokens], 1 at the response and its end-of-sequence token."""

    index: int
    token_ids: tuple[int, ...]
    mask: tuple[int, ...]


@dataclass(frozen=True)
class DataReport:
    """What became of the rows of a source: (index, reason) of the bad ones, indices of the overlong ones."""

    path: str
    read: int
    kept: int
    bad: tuple[tuple[int, str], ...]
    overlong: tuple[int, ...]
    longest: int
    fingerprint: str

    def text(self) -> str:
        """One line for the log."""
        line = f"data {self.path}: {self.kept} of {self.read} rows kept, longest {self.longest} tokens"
        if self.bad:
            reasons = Counter(reason for _, reason in self.bad)
            line += f"; {len(self.bad)} bad rows dropped (" + ", ".join(f"{n} x {reason}" for reason, n in reasons.items()) + ")"
        if self.overlong:
            line += f"; {len(self.overlong)} overlong rows dropped (first: row {self.overlong[0]})"
        return line


def load_rows(data: DataConfig, tokenizer: Any, path: str | None = None) -> tuple[list[Row], DataReport]:
    """The usable rows of `path` (default: data.train) and a report.

    Raises UserError for a file that cannot be read, for bad or overlong rows where the config says so (one message with
    index and reason of each), and where nothing is left.
    """
    source = path or data.train
    rows: list[Row] = []
    bad: list[tuple[int, str]] = []
    overlong: list[int] = []
    raw = list(read_rows(source))
    _check_fields(source, raw, [("prompt_field", data.prompt_field), ("answer_field", data.answer_field)])
    for index, fields in enumerate(raw):
        try:
            if isinstance(fields, BadRow):
                raise fields
            text, ids = encode_prompt(tokenizer, data, fields)
            answer = None if data.answer_field is None else _answer(fields, data.answer_field)
        except BadRow as error:
            bad.append((index, str(error)))
            continue
        if len(ids) > data.max_prompt_tokens:
            overlong.append(index)
        else:
            rows.append(Row(index, tuple(ids), text, answer, fields))
    report = _report(source, data, len(raw), bad, overlong, [r.prompt_ids for r in rows], [r.answer for r in rows],
                     f"data.max_prompt_tokens {data.max_prompt_tokens}")
    return rows, report


def sft_examples(data: DataConfig, tokenizer: Any, path: str | None = None,
                 max_sequence_tokens: int | None = None) -> tuple[list[SftExample], DataReport]:
    """Prompt/response rows as token ids with a loss mask; errors as in `load_rows`.

    The response is tokenized by itself and put behind the prompt's ids, as an engine would have made it.
    """
    source = path or data.train
    examples: list[SftExample] = []
    bad: list[tuple[int, str]] = []
    overlong: list[int] = []
    raw = list(read_rows(source))
    _check_fields(source, raw, [("prompt_field", data.prompt_field), ("response_field", data.response_field)])
    for index, fields in enumerate(raw):
        try:
            if isinstance(fields, BadRow):
                raise fields
            _, prompt = encode_prompt(tokenizer, data, fields)
            response = encode_response(tokenizer, fields.get(data.response_field))
        except BadRow as error:
            bad.append((index, str(error)))
            continue
        if len(prompt) > data.max_prompt_tokens or (max_sequence_tokens and len(prompt) + len(response) > max_sequence_tokens):
            overlong.append(index)
        else:
            examples.append(SftExample(index, tuple(prompt + response), (0,) * len(prompt) + (1,) * len(response)))
    limit = f"data.max_prompt_tokens {data.max_prompt_tokens}" + (
        f" or sft.max_sequence_tokens {max_sequence_tokens}" if max_sequence_tokens else "")
    report = _report(source, data, len(raw), bad, overlong, [e.token_ids for e in examples], [None] * len(examples), limit)
    return examples, report


def _answer(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if value is None or (isinstance(value, str) and not value.strip()):
        raise BadRow(f"field {name!r} (the answer) is missing or empty")
    if isinstance(value, (dict, list)):
        raise BadRow(f"field {name!r} (the answer) is a {type(value).__name__}, not text or a number")
    return str(value)


def _check_fields(source: str, raw: list[Any], wanted: list[tuple[str, str | None]]) -> None:
    """A field that no row has is a misspelt name, not many bad rows."""
    rows = [r for r in raw if isinstance(r, dict)]
    present = sorted({key for row in rows for key in row})
    for option, name in wanted:
        if rows and name is not None and name not in present:
            guess = nearest(name, present)
            raise UserError(f"data.{option} is {name!r}, but no row of {source!r} has that field; "
                            f"fields there: {', '.join(present) or 'none'}"
                            + (f"; did you mean {guess!r}?" if guess else ""))


def _report(source: str, data: DataConfig, read: int, bad: list[tuple[int, str]], overlong: list[int],
            token_ids: list[tuple[int, ...]], answers: list[str | None], limit: str) -> DataReport:
    if bad and data.bad_rows == "error":
        lines = "\n".join(f"  row {index}: {reason}" for index, reason in bad[:_SHOWN])
        more = f"\n  and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise UserError(f"{source!r} has {len(bad)} bad rows of {read}; mend them, or set data.bad_rows: drop\n{lines}{more}")
    if overlong and data.overlong == "error":
        raise UserError(f"{source!r} has {len(overlong)} rows longer than {limit} (first: row {overlong[0]}); raise the limit, "
                        "shorten them, or set data.overlong: drop")
    if not token_ids:
        raise UserError(f"{source!r} gives no prompts: {read} rows read, {len(bad)} bad, {len(overlong)} longer than {limit}; "
                        "give a file with at least one usable row")
    return DataReport(source, read, len(token_ids), tuple(bad), tuple(overlong), max(map(len, token_ids)),
                      _fingerprint(zip(token_ids, answers, strict=True)))


def _fingerprint(rows: Iterable[tuple[tuple[int, ...], str | None]]) -> str:
    """A short hash of everything a run sees of its rows, in order."""
    digest = hashlib.blake2b(digest_size=12)
    for ids, answer in rows:
        digest.update(repr((ids, answer)).encode())
    return digest.hexdigest()


class PromptStream:
    """An endless order of row positions 0..rows_count-1: one permutation per epoch, from (seed, epoch) and nothing else.

    The position counts prompts, not steps or ranks, so it means the same under another step size or layout.
    """

    def __init__(self, rows_count: int, seed: int, prompts_per_step: int, shuffle: bool = True, fingerprint: str = "") -> None:
        if rows_count < 1:
            raise UserError("the prompt set is empty; give a data file with at least one usable row")
        self.rows_count, self.seed, self.prompts_per_step = rows_count, seed, prompts_per_step
        self.shuffle, self.fingerprint, self.position = shuffle, fingerprint, 0
        self._order: tuple[int, list[int]] = (-1, [])

    @property
    def epoch(self) -> int:
        return self.position // self.rows_count

    def take(self, n: int | None = None) -> list[int]:
        """The next `n` (default: prompts_per_step) row positions; the stream moves on."""
        chosen = []
        for _ in range(self.prompts_per_step if n is None else n):
            chosen.append(self._permutation(self.epoch)[self.position % self.rows_count])
            self.position += 1
        return chosen

    def _permutation(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            order = list(range(self.rows_count))
            if self.shuffle:  # sorted by hash: the same in every version of every library
                order.sort(key=lambda i: hashlib.blake2b(f"{self.seed}/{epoch}/{i}".encode(), digest_size=16).digest())
            self._order = (epoch, order)
        return self._order[1]

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"position": self.position, "rows_count": self.rows_count, "seed": self.seed, "shuffle": self.shuffle,
                "fingerprint": self.fingerprint}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state`. Raises UserError where data, seed or shuffling are not those of the checkpoint."""
        for key, what in (("rows_count", "number of usable rows"), ("fingerprint", "content of the rows"), ("seed", "run.seed"),
                          ("shuffle", "data.shuffle")):
            ours = getattr(self, key)
            if state[key] != ours:
                raise UserError(f"cannot resume: {what} changed from {state[key]!r} to {ours!r} since the checkpoint, so the position "
                                f"{state['position']} would skip or repeat prompts; restore it, or start in a new run.dir")
        self.position = int(state["position"])
