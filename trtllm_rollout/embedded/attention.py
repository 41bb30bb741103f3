"""Attention of one step over the block pool: parts of prompts, and new tokens of running samples.

New tokens read the pool block by block. A *part* is one block read by one or more rows: the block of a shared prompt is read once for
all rows that see it, a block of a sample's own tokens by its one row. Every part gives its rows an output and the sum of its
exponentials, and a row's parts are merged by those (as in flash attention; for shared prompts: "Hydragen", arXiv:2402.05099).

What a row gets depends on nothing but its own text: a part is always one block, parts are merged in the order of the text, products
have at least 4 rows where their number varies (below that CPU libraries take another kernel, whose rounding differs), and prompts are
computed in tiles of one block whatever the chunks they come in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from trtllm_rollout.embedded.backends import HIDDEN, Attend, product
from trtllm_rollout.embedded.heads import Heads
from trtllm_rollout.embedded.kv_cache import KVCache

MIN_ROWS = 4
SMALL_PRODUCT = 400  # multiplications below which torch does not call the library for a product of a batch
LANES = 16  # fp32 numbers in the widest vector register
DENSE = 0.6  # a run of blocks is read in place where so much of it is wanted, else gathered


@dataclass(frozen=True)
class PromptPart:
    """Tokens [start, stop) of a prompt, in `blocks` [all blocks up to stop]; `start` is a multiple of the block size."""

    start: int
    stop: int
    blocks: Sequence[int]


@dataclass(frozen=True)
class Row:
    """One new token at `position`: it sees the `prompt` tokens in `prompt_blocks`, then those in `own_blocks` up to itself."""

    position: int
    prompt: int
    prompt_blocks: Sequence[int]
    own_blocks: Sequence[int]


@dataclass(frozen=True)
class Parts:
    """Parts that are read by the same number of rows.

    `blocks` is a slice of the pool or the blocks' ids [parts]; `rows` [parts, readers] the rows that read each (0 where idle), `bias`
    by window the scores' bias [parts, 1, readers, 1, block_size]; `first` the place of the first of these outputs among all.
    """

    blocks: slice | torch.Tensor
    rows: torch.Tensor
    bias: dict[int | None, torch.Tensor]
    first: int


class StepAttention:
    """Attention of the rows of one step: those of `prompts` first, then `rows`, then padding."""

    def __init__(self, cache: KVCache, heads: Sequence[Heads], backends: Sequence[Attend], prompts: Sequence[PromptPart], rows: Sequence[Row],
                 padding: int, device: torch.device) -> None:
        self._cache, self._heads, self._backends, self._device = cache, heads, backends, device
        self._prompts, self._padding, self._decoded = list(prompts), padding, len(rows)
        self._windows = list(dict.fromkeys(h.window for h in heads))
        self._prompt_rows = sum(p.stop - p.start for p in prompts)
        size = cache.block_size
        at = [(p.blocks[t // size], t % size) for p in prompts for t in range(p.start, p.stop)]
        at += [(r.own_blocks[(r.position - r.prompt) // size], (r.position - r.prompt) % size) for r in rows]
        places = np.array(at, np.int64).reshape(-1, 2)
        self._blocks, self._offsets = self._tensor(places[:, 0].copy()), self._tensor(places[:, 1].copy())
        self._ids = [self._tensor(np.array(p.blocks, np.int64)) for p in prompts]
        self._tiles = {(p.start, p.stop, w): self._prompt_bias(p, w) for p in prompts for w in self._windows}
        if rows:
            least = max(-(-max(MIN_ROWS, -(-SMALL_PRODUCT // (size * min(h.key_dim, h.value_dim)))) // (h.queries // h.kv)) for h in heads)
            self._parts, self._table, self._outputs = plan_parts(rows, size, self._windows, device, least, max(2, torch.get_num_threads()))

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> torch.Tensor:
        """`q` [rows, queries, key_dim], `k` [rows, kv, key_dim], `v` [rows, kv, value_dim] or None; returns [rows, queries, value_dim]."""
        h, written = self._heads[layer], self._prompt_rows + self._decoded
        self._cache.write(layer, self._blocks, self._offsets, k[:written], None if v is None else v[:written])
        out = torch.zeros(len(q), h.queries, h.value_dim, dtype=q.dtype, device=q.device)
        start = 0
        for part, ids in zip(self._prompts, self._ids, strict=True):
            start = self._prompt(layer, part, ids, q, out, start)
        if self._decoded:
            out[start:written] = self._decode(layer, q[start:written])
        return out

    def note_experts(self, layer: int, chosen: torch.Tensor) -> None:
        """Keep the experts `chosen` [rows, top_k] by the model's `layer`-th layer that has any, beside its keys."""
        self._cache.write_choice(layer, self._blocks, self._offsets, chosen[:self._prompt_rows + self._decoded])

    def _prompt(self, layer: int, part: PromptPart, ids: torch.Tensor, q: torch.Tensor, out: torch.Tensor, row: int) -> int:
        """Tiles of one block of queries, over all of the prompt up to each. Returns the row after the part."""
        h, dtype, size = self._heads[layer], self._cache.dtype, self._cache.block_size
        keys, values = (t[layer].index_select(0, ids).transpose(0, 1).flatten(1, 2) for t in (self._cache.keys, self._cache.values))
        for start, bias in zip(range(part.start, part.stop, size), self._tiles[part.start, part.stop, h.window], strict=True):
            stop = min(start + size, part.stop)
            rows = slice(row, row + stop - start)
            tile = q[rows].to(dtype).unflatten(1, (h.kv, -1)).permute(1, 2, 0, 3).flatten(1, 2)  # heads of a key-value group become rows
            mask = bias.repeat(h.queries // h.kv, 1)
            attended, lse = self._backends[layer](tile, keys[:, :stop], values[:, :stop], mask, h.scale)
            if h.sinks is not None:
                sinks = h.sinks.float().view(h.kv, -1, 1).expand(-1, -1, stop - start).flatten(1)
                attended = attended * torch.softmax(torch.stack([lse, sinks], -1), -1)[..., :1]
            out[rows] = attended.unflatten(1, (-1, stop - start)).permute(2, 0, 1, 3).flatten(1, 2)
            row += stop - start
        return row

    def _prompt_bias(self, part: PromptPart, window: int | None) -> list[torch.Tensor]:
        """Per tile, the bias [rows, tokens]: 0 where a query sees a token."""
        out, size = [], self._cache.block_size
        for start in range(part.start, part.stop, size):
            stop = min(start + size, part.stop)
            distance = np.arange(start, stop)[:, None] - np.arange(stop)
            seen = (distance >= 0) & (distance < (window or stop))
            out.append(self._tensor(np.where(seen, 0.0, HIDDEN).astype(np.float32)))
        return out

    def _decode(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """`q` [rows, queries, key_dim] of new tokens; returns [rows, queries, value_dim] fp32."""
        h, dtype = self._heads[layer], self._cache.dtype
        group = h.queries // h.kv
        scaled = (q.float() * h.scale).to(dtype).flatten(1)
        outputs = torch.empty(self._outputs, h.kv, group, h.value_dim, device=q.device)
        largest = torch.full((self._outputs + 1, h.kv, group), HIDDEN, device=q.device)
        mass = torch.zeros_like(largest)  # sum of exp(score - largest)
        for parts in self._parts:
            keys, values = (_blocks(t[layer], parts.blocks).flatten(0, 1) for t in (self._cache.keys, self._cache.values))
            count, readers = parts.rows.shape
            place = slice(parts.first, parts.first + count * readers)
            query = scaled.index_select(0, parts.rows.flatten()).view(count, readers, h.kv, group, h.key_dim)
            scores = product(query.transpose(1, 2).reshape(count * h.kv, readers * group, h.key_dim), keys.transpose(1, 2))
            scores.view(count, h.kv, readers, group, -1).add_(parts.bias[h.window])
            probs = torch.softmax(scores, -1)
            for into, found in ((largest, scores.amax(-1)), (mass, probs.amax(-1).reciprocal_())):
                into[place].view(count, readers, h.kv, group).copy_(found.view(count, h.kv, readers, group).transpose(1, 2))
            if readers == 1:
                product(probs.to(dtype), values, outputs[place].view(count * h.kv, group, h.value_dim))
            else:
                attended = product(probs.to(dtype), values).view(count, h.kv, readers, group, h.value_dim)
                outputs[place].view(count, readers, h.kv, group, h.value_dim).copy_(attended.transpose(1, 2))
        return merge(outputs.flatten(1, 2), largest.flatten(1), mass.flatten(1), self._table, h.sinks)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def _blocks(pool: torch.Tensor, chosen: slice | torch.Tensor) -> torch.Tensor:
    return pool[chosen] if isinstance(chosen, slice) else pool.index_select(0, chosen)


def merge(outputs: torch.Tensor, largest: torch.Tensor, mass: torch.Tensor, table: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """One output per row of its parts' `outputs` [parts, heads, dim], largest scores and exponentials' sums [parts + 1, heads].

    `table` [rows, most parts] says which parts a row has, in order; the last of `largest` (HIDDEN) and `mass` (0) where it has fewer. A
    sink [heads] takes part in the softmax and has no value. The exponentials come from a softmax over the last dimension, which is the
    same for a row wherever it lies; torch's elementwise exp and log compute the end of a thread's share by another function.
    """
    rows, most = table.shape
    scores = largest.index_select(0, table.flatten()).view(rows, most, -1)
    if sinks is not None:
        scores = torch.cat([sinks.float().expand(rows, 1, -1), scores], 1)
    padded = F.pad(scores.transpose(1, 2), (0, -scores.shape[1] % LANES), value=HIDDEN)  # or the sum's order would follow the longest row
    relative = torch.softmax(padded, -1).transpose(1, 2)  # [rows, parts, heads], all by the same factor too small or large
    first = 0 if sinks is None else 1
    weights = relative[:, first:first + most] * mass.index_select(0, table.flatten()).view(rows, most, -1)
    total = relative[:, 0] + weights[:, 0] if first else weights[:, 0].clone()
    index = table.clamp(max=len(outputs) - 1)  # the output of a part that is not there has weight 0
    out = weights[:, 0, :, None] * outputs.index_select(0, index[:, 0])
    for j in range(1, most):  # one after the other: a sum over the dimension would be grouped by its length
        out.addcmul_(weights[:, j, :, None], outputs.index_select(0, index[:, j]))
        total += weights[:, j]
    return out.div_(total[..., None])


def plan_parts(rows: Sequence[Row], size: int, windows: Sequence[int | None], device: torch.device, least: int,
               threads: int) -> tuple[list[Parts], torch.Tensor, int]:
    """The parts of `rows`, the table of every row's parts in order [rows, most parts], and the number of outputs.

    Blocks of prompts have at least `least` readers, blocks of own tokens one: how many rows a product has then depends on what else
    runs only above the number from which that makes no difference. A set of parts has at least `threads` of them, or a product would
    be split between threads.
    """
    readers: dict[int, list[int]] = {}  # prompt block -> rows
    own: dict[int, list[tuple[int, int]]] = {}  # copy -> (block, row): a block that several rows of one sample read is read by each
    where: dict[int, tuple[int, int]] = {}  # block -> (position of its first token, tokens of it that count)
    copies: dict[int, int] = {}
    for i, row in enumerate(rows):
        for j, block in enumerate(row.prompt_blocks):
            readers.setdefault(block, []).append(i)
            where[block] = (j * size, min(size, row.prompt - j * size))
        for j, block in enumerate(row.own_blocks[:(row.position - row.prompt) // size + 1]):
            copies[block] = copies.get(block, -1) + 1
            own.setdefault(copies[block], []).append((block, i))
            where[block] = (row.prompt + j * size, size)
    sets: dict[tuple[int, int], list[tuple[int, list[int]]]] = {(0, copy): [(b, [i]) for b, i in pairs] for copy, pairs in own.items()}
    for block, some in readers.items():
        sets.setdefault((1, max(least, 1 << (len(some) - 1).bit_length())), []).append((block, some))
    positions = np.array([row.position for row in rows])
    parts: list[Parts] = []
    places: dict[tuple[int, int], int] = {}  # (block, row) -> output
    first = 0
    for (shared, width), chosen in sets.items():
        parts.append(_parts(sorted(chosen), width if shared else 1, first, positions, where, size, windows, device, threads, places))
        first += parts[-1].rows.numel()
    most = max(len(r.prompt_blocks) + (r.position - r.prompt) // size + 1 for r in rows)
    table = np.full((len(rows), most), first, np.int64)
    for i, row in enumerate(rows):
        mine = [*row.prompt_blocks, *row.own_blocks[:(row.position - row.prompt) // size + 1]]
        table[i, :len(mine)] = [places[block, i] for block in mine]
    return parts, torch.from_numpy(table).to(device), first


def _parts(chosen: list[tuple[int, list[int]]], readers: int, first: int, positions: np.ndarray, where: dict[int, tuple[int, int]], size: int,
           windows: Sequence[int | None], device: torch.device, threads: int, places: dict[tuple[int, int], int]) -> Parts:
    """The parts of blocks with their rows, `chosen` in order of blocks; notes in `places` where each output goes."""
    ids = [block for block, _ in chosen]
    low, high = ids[0], ids[-1] + 1
    in_place = len(ids) >= DENSE * (high - low) and high - low >= threads
    slots = [block - low for block in ids] if in_place else list(range(len(ids)))
    count = high - low if in_place else max(len(ids), threads)
    rows, starts, counts = np.zeros((count, readers), np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64)
    for slot, (block, some) in zip(slots, chosen, strict=True):
        rows[slot, :len(some)] = some
        starts[slot], counts[slot] = where[block]
        for k, row in enumerate(some):
            places[block, row] = first + slot * readers + k
    token = starts[:, None] + np.arange(size)
    distance = np.where((np.arange(size) < counts[:, None])[:, None], positions[rows][..., None] - token[:, None], -1)  # [parts, readers, size]
    bias = {w: torch.from_numpy(np.where((distance >= 0) & (distance < (w or np.iinfo(np.int64).max)), 0.0, HIDDEN).astype(np.float32))
            [:, None, :, None].to(device) for w in windows}
    blocks: slice | torch.Tensor = slice(low, high)
    if not in_place:
        blocks = torch.tensor(ids + [ids[0]] * (count - len(ids)), device=device)
    return Parts(blocks, torch.from_numpy(rows).to(device), bias, first)
