"""Which sequences a data-parallel rank computes and in which micro-batches: balanced by work, the same plan on every rank, no tensor touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from parallel.config import ParallelConfig
from parallel.errors import UserError
from parallel.model_config import ModelConfig

Packing = Literal["packed", "padded", "shared_prompt"]
SHARED_NEEDS_TORCH = ("packing is shared_prompt, but the layers are Transformer Engine's (te), whose attention cannot let several responses see one "
                      "prompt; set layer_implementation: torch, or packing: packed")


@dataclass(frozen=True)
class Batching:
    """How sequences become micro-batches.

    `packed`: one row of sequences one after the other; `padded`: rows padded on the right; `shared_prompt`: packed, and the prompt of
    sequences that begin alike stands in the row once. `max_tokens`, where set, is the most tokens of a micro-batch (padding included)
    and takes the place of a number of sequences.
    """

    packing: Packing = "packed"
    max_tokens: int | None = None


@dataclass(frozen=True)
class Needed:
    """What of a sequence must be computed: its first `inputs` tokens, of which `prompt` come before the first token that is predicted."""

    prompt: int
    inputs: int


def needed(tokens: int, mask: Sequence[bool] | None) -> Needed:
    """Of a sequence of `tokens` tokens whose log-probs are wanted where `mask` is true (None: everywhere)."""
    if mask is None:
        return Needed(min(1, tokens), max(tokens - 1, 0))
    wanted = [i for i, m in enumerate(mask) if m and i]
    return Needed(wanted[0], wanted[-1]) if wanted else Needed(0, 0)


@dataclass(frozen=True)
class Unit:
    """Sequences that stay together: one, or those of a shared prompt. `tokens` are what they add to a packed row."""

    indices: tuple[int, ...]
    tokens: int
    work: float


class Work:
    """Floating-point operations of a forward pass, up to a common factor: linear in the tokens, quadratic in what attention sees."""

    def __init__(self, model: ModelConfig) -> None:
        self.per_token = float(_weights(model))
        value = model.mla.v_head_dim if model.mla else model.head_dim
        # scores and weighted sums: a multiply-add per head, dimension and key
        self.per_key = float(model.num_layers * model.num_heads * (model.head_dim + value))

    def __call__(self, inputs: int, before: int = 0) -> float:
        """Of `inputs` tokens that each see `before` earlier ones too."""
        return self.per_token * inputs + self.per_key * (inputs * (inputs + 1) / 2 + inputs * before)


def _weights(model: ModelConfig) -> int:
    """Weights that a token is multiplied with, the chosen experts' only; latent attention as if it were not compressed."""
    attention = 2 * model.hidden_size * model.head_dim * (model.num_heads + model.num_kv_heads)
    dense = 3 * model.hidden_size * model.intermediate_size * (model.num_layers - len(model.moe_layers))
    moe = model.moe
    experts = 3 * model.hidden_size * (moe.top_k * moe.intermediate_size + moe.shared_intermediate_size) * len(model.moe_layers) if moe else 0
    return model.num_layers * attention + dense + experts + model.vocab_size * model.hidden_size


def plan_micro_batches(sequences: Sequence[Sequence[int]], chosen: Sequence[int], masks: Sequence[Sequence[bool]] | None, size: int,
                       batching: Batching, model: ModelConfig, parallel: ParallelConfig, dp: int) -> list[list[tuple[int, ...]]]:
    """For every data-parallel rank its micro-batches, as indices of `sequences`; their number is the same on all ranks (some may be empty).

    `chosen` are the sequences to compute, at most `size` in a micro-batch where there is no token budget. The result depends on these
    arguments only. Raises UserError where one sequence is longer than the budget.
    """
    parts = {i: needed(len(sequences[i]), masks[i] if masks is not None else None) for i in chosen}
    if batching.packing == "padded":
        parts = {i: Needed(1, len(sequences[i])) for i in chosen}
    if batching.max_tokens is not None:  # rows are padded under sequence and context parallelism
        multiple = parallel.row_multiple
        for i, part in parts.items():
            if -(-part.inputs // multiple) * multiple > batching.max_tokens:
                longest = -(-max(p.inputs for p in parts.values()) // multiple) * multiple
                raise UserError(f"max_tokens_per_micro_batch is {batching.max_tokens}, but sequence {i} alone has {part.inputs} tokens; "
                                f"raise it to at least {longest}, or limit prompts and responses")
        batching = replace(batching, max_tokens=batching.max_tokens // multiple * multiple)
    work = Work(model)
    if batching.packing == "shared_prompt" and masks is not None:
        units = _shared(sequences, parts, size, batching.max_tokens, work, dp)
    else:
        units = [Unit((i,), part.inputs, work(part.inputs)) for i, part in parts.items()]
    ranks = [_bins(mine, size, batching, parallel) for mine in _balance(units, dp, batching.max_tokens is None)]
    count = max(1, *(len(bins) for bins in ranks))
    if parallel.chunks > 1:  # interleaved pipelines take a multiple of the number of stages
        count = -(-count // parallel.pp) * parallel.pp
    return [bins + [()] * (count - len(bins)) for bins in ranks]


def _shared(sequences: Sequence[Sequence[int]], parts: dict[int, Needed], size: int, max_tokens: int | None, work: Work, dp: int) -> list[Unit]:
    """Units of sequences with equal prompts, cut where they are too large, or too few for every rank to get one."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, part in parts.items():
        groups.setdefault(tuple(sequences[i][:part.prompt]), []).append(i)
    pieces = -(-dp // max(len(groups), 1))
    units = []
    for prompt, members in groups.items():
        limit = min(-(-len(members) // pieces), size if max_tokens is None else len(members))
        p, open_, tokens = len(prompt), [], len(prompt)
        for i in members:
            own = parts[i].inputs - p
            if open_ and (len(open_) == limit or (max_tokens is not None and tokens + own > max_tokens)):
                units.append(_unit(open_, p, parts, work))
                open_, tokens = [], p
            open_.append(i)
            tokens += own
        units.append(_unit(open_, p, parts, work))
    return units


def _unit(indices: list[int], prompt: int, parts: dict[int, Needed], work: Work) -> Unit:
    own = [parts[i].inputs - prompt for i in indices]
    return Unit(tuple(indices), prompt + sum(own), work(prompt) + sum(work(n, prompt) for n in own))


def _balance(units: list[Unit], ranks: int, even: bool) -> list[list[Unit]]:
    """Every unit to the rank with the least work so far, the largest first; with `even` no rank gets more units than its share."""
    most = -(-len(units) // ranks)
    loads, out = [0.0] * ranks, [[] for _ in range(ranks)]  # type: list[float], list[list[Unit]]
    for unit in sorted(units, key=lambda u: (-u.work, u.indices)):
        rank = min((r for r in range(ranks) if not even or len(out[r]) < most), key=lambda r: (loads[r], r))
        loads[rank] += unit.work
        out[rank].append(unit)
    return [sorted(mine, key=lambda u: u.indices) for mine in out]


def _bins(units: list[Unit], size: int, batching: Batching, parallel: ParallelConfig) -> list[tuple[int, ...]]:
    """One rank's units in micro-batches."""
    if batching.max_tokens is None:
        by_count: list[list[int]] = []
        for unit in units:
            if not by_count or len(by_count[-1]) + len(unit.indices) > size:
                by_count.append([])
            by_count[-1].extend(unit.indices)
        return [tuple(b) for b in by_count]
    multiple = parallel.row_multiple
    bins: list[tuple[list[int], list[int]]] = []  # indices and tokens of each unit
    for unit in sorted(units, key=lambda u: (-u.tokens, u.indices)):  # first fit, the largest first
        for indices, tokens in bins:
            total = -(-tokens[0] // multiple) * multiple * (len(tokens) + 1) if batching.packing == "padded" else sum(tokens) + unit.tokens
            if total <= batching.max_tokens:
                break
        else:
            indices, tokens = [], []
            bins.append((indices, tokens))
        indices.extend(unit.indices)
        tokens.append(unit.tokens)
    return sorted(tuple(sorted(indices)) for indices, _ in bins)
