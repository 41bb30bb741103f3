"""Prompts from a file, for commands that generate: JSONL, parquet, or text with one prompt a line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.config import DataConfig
from mcore_rl.readers import BadRow, read_rows
from mcore_rl.tokens import encode_prompt
from parallel.errors import UserError, nearest

FIELDS = ("prompt", "question", "problem")  # ours, GSM8K's, MATH's: the first that rows have


@dataclass(frozen=True)
class Prompt:
    """`text` as it was read (or chat messages), and the token ids that a model gets."""

    text: Any
    ids: tuple[int, ...]


def read_prompts(source: str, tokenizer: Any, field: str | None = None, chat: bool = False, system: str | None = None,
                 limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of `source` (.jsonl, .parquet, a directory of such, builtin:NAME, or .txt with one prompt a line).

    Lists of messages go through the chat template, and text too with `chat` (as the user's turn, after `system`). Raises UserError that
    names a row which cannot be used, and where there is none.
    """
    rows = list(_lines(source) if source.endswith(".txt") else read_rows(source))[:limit]
    name = field or next((f for f in FIELDS if any(isinstance(row, dict) and f in row for row in rows)), FIELDS[0])
    present = sorted({key for row in rows if isinstance(row, dict) for key in row})
    if field and present and field not in present:
        guess = nearest(field, present)
        raise UserError(f"--prompt-field is {field!r}, but no row of {source} has it; fields there: {', '.join(present)}"
                        + (f"; did you mean {guess!r}?" if guess else ""))
    prompts = [_prompt(source, i, row, name, tokenizer, chat, system) for i, row in enumerate(rows)]
    if not prompts:
        raise UserError(f"--prompts {source}: no prompts; give one JSON object a line with a field prompt, or a .txt file with one prompt a line")
    return prompts


def _prompt(source: str, index: int, row: Any, name: str, tokenizer: Any, chat: bool, system: str | None) -> Prompt:
    try:
        if isinstance(row, BadRow):
            raise row
        form = "chat" if chat or isinstance(row.get(name), list) else "text"
        if form == "chat" and not tokenizer.chat_template:
            raise BadRow("the tokenizer has no chat template; leave --chat out and give prompts as text")
        data = DataConfig(train=source, prompt_format=form, prompt_field=name, system_prompt=system)
        return Prompt(row[name] if name in row else None, tuple(encode_prompt(tokenizer, data, row)[1]))
    except BadRow as error:
        raise UserError(f"--prompts {source} row {index}: {error}") from None


def _lines(source: str) -> Iterator[dict[str, Any]]:
    try:
        lines = Path(source).read_text(encoding="utf-8-sig").split("\n")  # a form feed or U+2028 ends no prompt
    except OSError as error:
        raise UserError(f"--prompts {source} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--prompts {source} cannot be read as UTF-8 text: {error}") from None
    yield from ({"prompt": line} for line in lines if line.strip())
