"""Exporting a model that is spread over ranks as a Hugging Face directory: no rank ever holds more than a bucket of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from checkpoint.hf_writer import HFWriter, check_writable
from parallel.model_config import ModelConfig
from resharding.agreement import together
from resharding.boxes import intersect, volume
from resharding.checksum import verify
from resharding.errors import WeightsError
from resharding.layout import (
    Layout,
    Listed,
    LocalTensor,
    Party,
    Piece,
    Shard,
    canonical_blocks,
    canonical_dtypes,
    check_tensors,
    empty_tensors,
)
from resharding.layouts import hf_layout
from resharding.piece_sums import piece_checksums
from resharding.plan import make_plan
from resharding.transport import execute


@dataclass(frozen=True)
class _Slab:
    """Rows [start, stop) of the file tensor `name`, as a local tensor of the rank that writes them."""

    name: str
    start: int
    stop: int
    tensor: LocalTensor


def export_hf(directory: str | Path, source_layouts: Party | Sequence[Layout], source_tensors: Mapping[str, torch.Tensor],
              model: ModelConfig, dtype: torch.dtype, source: str | Path | None = None, rank: int = 0,
              group: dist.ProcessGroup | None = None, overwrite: bool = False, bucket_bytes: int = 64 << 20) -> None:
    """Collective over `group`: write the weights of a party as a HF directory in `dtype`, all ranks at once.

    Every rank writes slabs of rows, of tensors that it holds where it can, so that most bytes do not travel. A rank holds at most
    `bucket_bytes` (or one row, or one expert of a fused tensor) of the file's tensors at a time, beside two buckets of messages.
    `source` is a directory to copy tokenizer and generation files from.
    Raises on every rank where any fails. WeightsError: replicas (tied copies, data-parallel ranks) differ, or what arrived is
    not what was sent. UserError: the directory cannot be written. SyncError: anything else.
    """
    what = f"export to {str(directory)!r}"
    blocks = canonical_blocks(model)
    party: Party = Listed(source_layouts, blocks) if isinstance(source_layouts, Sequence) else source_layouts
    dtypes = canonical_dtypes(model, dtype)
    with together(what, group) as step:
        if not dist.is_initialized() or dist.get_rank(group) == 0:
            check_writable(directory, overwrite)
        sums: list[int] = []
        if rank in party.ranks:
            mine = party.layout(rank)
            check_tensors(mine, source_tensors)
            sums = piece_checksums(mine, source_tensors, dtypes)
        step.payload = (rank, sums)
    by_rank = dict(step.payloads)
    expected = verify([party.layout(r) for r in party.ranks], [by_rank[r] for r in party.ranks])
    layout = hf_layout(model, dtype)
    holders = _holders(party, len(blocks))
    rounds = _rounds(_share(layout, holders, bucket_bytes), bucket_bytes)
    with HFWriter(directory, layout, model, dtype, source, overwrite=overwrite, shared=True, group=group) as writer:
        with together(what, group) as step:
            step.payload = (rank, _move(rounds, holders, blocks, source_tensors, writer, rank, group, bucket_bytes))
        _verify_arrived(rounds, dict(step.payloads), expected)


def _holders(party: Party, blocks: int) -> dict[str, list[Shard]]:
    """The source's shards by the canonical tensors that they hold parts of."""
    out: dict[str, list[Shard]] = defaultdict(list)
    for block in range(blocks):
        for shard in party.shards(block):
            for name in {piece.canonical for piece in shard.tensor.pieces if piece.canonical is not None}:
                if shard not in out[name]:
                    out[name].append(shard)
    return out


def _slabs(layout: Layout, limit: int) -> Iterator[_Slab]:
    """Every tensor of the layout in slabs of rows of at most `limit` bytes (one row at least)."""
    for local in layout.tensors:
        rows = local.shape[0]
        step = max(1, limit * rows // max(1, local.nbytes))
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            pieces = tuple(part for piece in local.pieces for part in _rows(piece, start, stop))
            yield _Slab(local.name, start, stop, LocalTensor(f"{local.name}@{start}", (stop - start, *local.shape[1:]), local.dtype, pieces))


def _rows(piece: Piece, start: int, stop: int) -> Iterator[Piece]:
    """The part of a piece in rows [start, stop) of its tensor: rows of the whole, or an expert of a fused tensor."""
    if piece.view.index:
        first, *rest = piece.view.index
        if start <= first < stop:
            yield replace(piece, view=replace(piece.view, index=(first - start, *rest)))
        return
    (low, _), (region_low, _) = piece.place[0], piece.region[0]
    common = intersect((piece.place[0],), ((start, stop),))
    if common is not None:
        (a, b), = common
        region = ((region_low + a - low, region_low + b - low), *piece.region[1:])
        yield Piece(piece.canonical, region, (a - start, *piece.offset[1:]), piece.view)


def _share(layout: Layout, holders: Mapping[str, list[Shard]], bucket_bytes: int) -> dict[int, list[_Slab]]:
    """Who writes which slab: a rank that holds most of it, the one with the least to write so far."""
    load: dict[int, int] = defaultdict(int)
    out: dict[int, list[_Slab]] = defaultdict(list)
    for slab in _slabs(layout, bucket_bytes // 2):
        held: dict[Shard, int] = defaultdict(int)
        for wanted in slab.tensor.pieces:
            for shard in holders.get(wanted.canonical or "", ()):
                held[shard] += sum(volume(common) for piece in shard.tensor.pieces if piece.canonical == wanted.canonical
                                   for common in [intersect(piece.region, wanted.region)] if common is not None)
        if not held:
            raise WeightsError(f"{slab.name}: no rank holds it")
        most = max(held.values())
        writer = min((r for shard, size in held.items() if size == most for r in shard.ranks), key=load.__getitem__)
        load[writer] += slab.tensor.nbytes
        out[writer].append(slab)
    return out


def _rounds(share: Mapping[int, list[_Slab]], bucket_bytes: int) -> list[dict[int, list[_Slab]]]:
    """The slabs of every rank in rounds of at most `bucket_bytes` a rank."""
    rounds: list[dict[int, list[_Slab]]] = []
    for rank, slabs in share.items():
        number, filled = 0, 0
        for slab in slabs:
            if filled and filled + slab.tensor.nbytes > bucket_bytes:
                number, filled = number + 1, 0
            filled += slab.tensor.nbytes
            while number >= len(rounds):
                rounds.append({})
            rounds[number].setdefault(rank, []).append(slab)
    return rounds


@dataclass(frozen=True)
class _Part:
    """A source party cut down to the shards that one round reads."""

    kind: str
    ranks: tuple[int, ...]
    held: tuple[Shard, ...]

    def shards(self, block: int) -> Sequence[Shard]:
        return self.held if block == 0 else ()

    def layout(self, rank: int) -> Layout:
        return Layout(self.kind, rank, tuple(shard.tensor for shard in self.held if rank in shard.ranks))


def _layouts(slabs: Mapping[int, list[_Slab]]) -> list[Layout]:
    return [Layout("hf", rank, tuple(slab.tensor for slab in mine)) for rank, mine in sorted(slabs.items())]


def _move(rounds: list[dict[int, list[_Slab]]], holders: Mapping[str, list[Shard]], blocks: Sequence[Mapping[str, tuple[int, ...]]],
          tensors: Mapping[str, torch.Tensor], writer: HFWriter, rank: int, group: dist.ProcessGroup | None, bucket_bytes: int) -> list[list[int]]:
    """Move and write every round; the checksums of what arrived here, round by round. Keeps the protocol also where it fails."""
    shapes = {name: shape for block in blocks for name, shape in block.items()}
    device = next((t.device for t in tensors.values()), torch.device("cpu"))
    failures: list[Exception] = []
    found: list[list[int]] = []
    for slabs in rounds:
        names = {piece.canonical: None for mine in slabs.values() for slab in mine for piece in slab.tensor.pieces if piece.canonical}
        held = tuple({shard: None for name in names for shard in holders[name]})
        source = _Part("mcore", tuple(sorted({r for shard in held for r in shard.ranks})), held)
        now = {name: shapes[name] for name in names}
        plan = make_plan(source, _layouts(slabs), [now, {n: s for n, s in shapes.items() if n not in now}], read_all=False, rank=rank)
        here = Layout("hf", rank, tuple(slab.tensor for slab in slabs.get(rank, ())))
        try:
            buffers = empty_tensors(here, device)
            execute(plan, tensors, buffers, rank, group, bucket_bytes)
            found.append(piece_checksums(here, buffers))
            for slab in slabs.get(rank, ()) if not failures else ():
                writer.write(slab.name, buffers[slab.tensor.name], (slab.start, slab.stop))
        except Exception as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return found


def _verify_arrived(rounds: list[dict[int, list[_Slab]]], by_rank: Mapping[int, list[list[int]]], expected: Mapping[str, int]) -> None:
    layouts, values = [], []
    for rank, found in by_rank.items():
        layouts.append(Layout("hf", rank, tuple(slab.tensor for slabs in rounds for slab in slabs.get(rank, ()))))
        values.append([value for sums in found for value in sums])
    verify(layouts, values, expected)
