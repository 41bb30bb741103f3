"""The rival of `bench reshard`: put every tensor together whole on every rank, then slice what the engine wants, as verl and mbridge do.

Tensor by tensor: its shards are broadcast over the pipeline stages, then gathered over the tensor-parallel ranks (replicated tensors
are not), put together as canonical tensors, and sliced. It is made as quick as it can be: buffers are made once, and messages have the
size at which this machine's all-gather is quickest.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from math import prod

import torch
import torch.distributed as dist

from parallel.config import ParallelConfig
from resharding.boxes import slices
from resharding.layout import Layout
from resharding.layouts.mcore import McoreParty

CHUNKS = (1 << 20, 4 << 20, 16 << 20, 64 << 20)  # bytes that each rank puts into one all-gather


class Gather:
    """What one rank does. Collective over the world to make and to run; only the trainer's dense (tp, pp) grid is gathered."""

    def __init__(self, source: McoreParty, shapes: Mapping[str, tuple[int, ...]], mine: Layout | None, rank: int, device: torch.device) -> None:
        parallel: ParallelConfig = source.parallel
        self.tp, self.pp, self.rank, self.device, self.shapes, self.mine = parallel.tp, parallel.pp, rank, device, shapes, mine
        self.layouts = {r: source.layout(r) for r in source.ranks}
        self.trains = rank in source.ranks
        tp_groups = [dist.new_group([p * self.tp + t for t in range(self.tp)]) for p in range(self.pp)]
        pp_groups = [dist.new_group([p * self.tp + t for p in range(self.pp)]) for t in range(self.tp)]
        outside = [r for r in range(dist.get_world_size()) if r not in source.ranks]
        self.outside = dist.new_group([0, *outside]) if outside else None
        if self.trains:
            self.tp_group, self.pp_group = tp_groups[rank // self.tp], pp_groups[rank % self.tp]
        largest = max(t.nbytes for layout in self.layouts.values() for t in layout.tensors)
        self.shard = torch.zeros(largest, dtype=torch.uint8, device=device)
        self.shards = [torch.zeros(largest, dtype=torch.uint8, device=device) for _ in range(self.tp)]
        names = {p.canonical for layout in self.layouts.values() for t in layout.tensors for p in t.pieces if p.canonical}
        self.scratch = torch.zeros(max(prod(shapes[n]) for n in names) * 4, dtype=torch.uint8, device=device)
        self.wholes: dict[str, torch.Tensor] = {}
        self.gathered, self.waits, self.chunk = 0, [0.0], CHUNKS[0]
        if self.trains and self.tp > 1:
            self.chunk = max(CHUNKS, key=lambda chunk: max(self._bandwidth(chunk, 64 << 20) for _ in range(2)))

    def bandwidth(self) -> float:
        """Bytes per second that every rank receives when it gathers as much as `run` did last, from one buffer; 0 where none is gathered."""
        return self._bandwidth(self.chunk, self.gathered // (self.tp - 1)) if self.trains and self.gathered else 0.0

    def rate(self) -> float:
        """Bytes per second that every rank received in the last `run`'s all-gathers; of each, the seconds of the rank that came last."""
        if not self.gathered:
            return 0.0
        waits: list[list[float]] = [[]] * self.tp
        dist.all_gather_object(waits, self.waits, group=self.tp_group)
        return self.gathered / sum(min(each) for each in zip(*waits, strict=True))

    def _bandwidth(self, chunk: int, nbytes: int) -> float:
        data = torch.ones(chunk, dtype=torch.uint8, device=self.device)
        out = [torch.ones_like(data) for _ in range(self.tp)]
        rounds = max(1, nbytes // chunk)
        dist.barrier(self.tp_group)
        started = time.perf_counter()
        for _ in range(rounds):
            dist.all_gather(out, data, group=self.tp_group)
        found = torch.tensor(rounds * chunk * (self.tp - 1) / (time.perf_counter() - started), dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self.tp_group)  # the same on all ranks, which choose by it
        return float(found)

    def run(self, trainer: Mapping[str, torch.Tensor], engine: Mapping[str, torch.Tensor]) -> None:
        """Fill `engine` (this rank's tensors of the layout `mine`)."""
        places: dict[str, list[tuple[torch.Tensor, tuple[slice, ...], tuple[slice, ...]]]] = defaultdict(list)
        for local in self.mine.tensors if self.mine is not None else ():
            for piece in local.pieces:
                if piece.canonical is not None:
                    places[piece.canonical].append((piece.view.of(engine[local.name])[slices(piece.place)], (), slices(piece.region)))
                else:
                    piece.of(engine[local.name]).zero_()
        self.gathered, self.waits = 0, []
        for stage in range(self.pp):
            for name in self.layouts[stage * self.tp].by_name:
                for canonical, whole in self._whole(stage, name, trainer).items():
                    if self.outside is not None and self.rank in dist.get_process_group_ranks(self.outside):
                        dist.broadcast(whole, 0, group=self.outside)
                    for target, _, region in places.get(canonical, ()):
                        target.copy_(whole[region])

    def _whole(self, stage: int, name: str, trainer: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The canonical tensors of one local tensor of a stage, put together."""
        locals_ = [self.layouts[stage * self.tp + t][name] for t in range(self.tp)]
        own = locals_[self.rank % self.tp]
        wholes = self._wholes(locals_[0].dtype, dict.fromkeys(p.canonical for local in locals_ for p in local.pieces if p.canonical))
        if not self.trains:
            return wholes
        holds = self.rank // self.tp == stage
        shard = trainer[name].detach() if holds else self.shard[:own.nbytes].view(own.dtype).view(own.shape)
        if self.pp > 1:
            dist.broadcast(shard, stage * self.tp + self.rank % self.tp, group=self.pp_group)
        replicated = len({local for local in locals_}) == 1
        shards = [shard] if replicated or self.tp == 1 else self._gather(shard)
        for part, local in zip(shards, locals_):
            for piece in local.pieces:
                if piece.canonical is not None:
                    wholes[piece.canonical][slices(piece.region)] = piece.of(part)
        return wholes

    def _gather(self, shard: torch.Tensor) -> list[torch.Tensor]:
        flat = shard.reshape(-1).view(torch.uint8)
        started = time.perf_counter()
        for low in range(0, len(flat), self.chunk):
            high = min(low + self.chunk, len(flat))
            dist.all_gather([out[low:high] for out in self.shards], flat[low:high], group=self.tp_group)
        self.waits.append(time.perf_counter() - started)
        self.gathered += len(flat) * (self.tp - 1)
        return [out[:len(flat)].view(shard.dtype).view(shard.shape) for out in self.shards]

    def _wholes(self, dtype: torch.dtype, names: Mapping[str, None]) -> dict[str, torch.Tensor]:
        """Room for canonical tensors, in one buffer that is used again for the next tensors."""
        out, start = {}, 0
        for name in names:
            size = prod(self.shapes[name]) * dtype.itemsize
            if start + size > len(self.scratch):
                self.scratch = torch.zeros(start + 2 * size, dtype=torch.uint8, device=self.device)
                return self._wholes(dtype, names)
            out[name] = self.scratch[start:start + size].view(dtype).view(self.shapes[name])
            start += -(-size // 64) * 64
        return out
