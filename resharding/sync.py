"""Trainer to engine: move all weights, check them, commit one version on every rank or on none."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from resharding.agreement import together
from resharding.checksum import verify
from resharding.errors import CoverageError
from resharding.hosts import hosts
from resharding.layout import Layout, Listed, Party, check_tensors
from resharding.piece_sums import PieceSums
from resharding.plan import Blocks, Plan, make_plan
from resharding.transform import CAST, Transform
from resharding.transport import execute


class WeightsReceiver(Protocol):
    """What an engine offers to a sync. Between `begin_update` and `commit` it refuses to generate."""

    def begin_update(self) -> None: ...

    def weights(self) -> Mapping[str, torch.Tensor]: ...

    def commit(self, version: int, checksums: Mapping[str, int]) -> None: ...

    def verify(self) -> None: ...


@dataclass(frozen=True)
class SyncReport:
    """`bytes` written into engine tensors on all ranks; `seconds` of the whole sync, of which `checksum_seconds`."""

    bytes: int
    seconds: float
    checksum_seconds: float
    version: int


class WeightSync:
    """Built once for a pair of parties; holds this rank's plan. `group` holds all ranks of both parties."""

    def __init__(self, source: Party | Sequence[Layout], destination: Party | Sequence[Layout],
                 blocks: Mapping[str, tuple[int, ...]] | Blocks, rank: int = 0, group: dist.ProcessGroup | None = None,
                 bucket_bytes: int = 64 << 20, transform: Transform = CAST, transport: str = "auto", checksums: bool = True) -> None:
        """Collective. `blocks`: the canonical tensors, block by block as the parties number them (or in one mapping).

        `transport`: see `resharding.transport.execute`. `checksums=False` is for measuring: an engine refuses such weights.

        Raises CoverageError (on every rank) where the layouts do not cover the canonical tensors.
        """
        self.rank, self.group, self.bucket_bytes, self.transform = rank, group, bucket_bytes, transform
        self.transport, self.checksums = transport, checksums
        names = [b.keys() for b in ([blocks] if isinstance(blocks, Mapping) else blocks)]
        source = Listed(source, names) if isinstance(source, Sequence) else source
        destination = Listed(destination, names) if isinstance(destination, Sequence) else destination
        host = hosts(group)
        with together("the weight sync cannot be planned", group) as step:
            self.plan: Plan = make_plan(source, destination, blocks, rank=rank, host_of=host.__getitem__)
            step.payload = self.plan.bytes_written
        self._bytes = sum(step.payloads)
        self._sources = tuple(source.layout(r) for r in source.ranks)
        self._source = source.layout(rank) if rank in source.ranks else None
        self._destination = destination.layout(rank) if rank in destination.ranks else None
        dtypes = _destination_dtypes(destination, len(names))
        self._sums = PieceSums(self._source, dtypes, transform) if self._source is not None else None

    def run(self, source_tensors: Mapping[str, torch.Tensor], engine: WeightsReceiver | None, version: int) -> SyncReport:
        """Collective over all ranks of both parties: bring the engine to `version` of the source weights.

        A rank outside the engine's party passes `engine=None`, one outside the trainer's passes no tensors. Raises on every
        rank where any rank fails (WeightsError where weights are at fault, SyncError for anything else); no rank has then
        committed, engines keep refusing to generate, and the next sync that succeeds recovers them.
        """
        started = time.perf_counter()
        what = f"weights version {version} is not committed"
        with together(what, self.group):
            if engine is not None:
                engine.begin_update()  # before anything that may fail: what is resident is not what the caller wants any more
        with together(what, self.group):
            weights, source_tensors = self._prepare(source_tensors, engine)
        checksums, checksum_seconds = self._move(what, source_tensors, weights)
        try:
            with together(what, self.group):
                if engine is not None:
                    engine.commit(version, checksums)
            begun = time.perf_counter()
            if self.checksums:
                with together(what, self.group):
                    if engine is not None:
                        engine.verify()
        except Exception:
            if engine is not None:  # engines that did commit must refuse like the one that could not
                engine.begin_update()
            raise
        ended = time.perf_counter()
        return SyncReport(self._bytes, ended - started, checksum_seconds + ended - begun, version)

    def _prepare(self, source_tensors: Mapping[str, torch.Tensor],
                 engine: WeightsReceiver | None) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
        """The tensors to write, and those to read (collective where the transform needs to know more than its own shards)."""
        weights: Mapping[str, torch.Tensor] = {}
        source_tensors = self.transform.prepare(source_tensors)
        if engine is not None:
            weights = engine.weights()
        if self._destination is not None:
            check_tensors(self._destination, weights)
        if self._source is not None:
            check_tensors(self._source, source_tensors)
        return weights, source_tensors

    def _move(self, what: str, source_tensors: Mapping[str, torch.Tensor],
              weights: Mapping[str, torch.Tensor]) -> tuple[dict[str, int], float]:
        """Move, and compute the checksums of the source, in which replicas (tied copies, data parallel) must agree."""
        with together(what, self.group) as step:
            execute(self.plan, source_tensors, weights, self.rank, self.group, self.bucket_bytes, self.transform, self.transport)
            begun = time.perf_counter()
            values = self._sums(source_tensors) if self._sums is not None and self.checksums else []
            seconds = time.perf_counter() - begun
            step.payload = (self.rank, values) if self.checksums else None
        begun = time.perf_counter()
        if not self.checksums:
            return {}, 0.0
        gathered = dict(step.payloads)
        checksums = verify(self._sources, [gathered[layout.rank] for layout in self._sources])  # the same on every rank
        return checksums, seconds + time.perf_counter() - begun


def _destination_dtypes(destination: Party, blocks: int) -> dict[str, torch.dtype]:
    """The dtype in which each canonical tensor arrives: the checksum is taken of those values."""
    dtypes: dict[str, torch.dtype] = {}
    for block in range(blocks):
        for shard in destination.shards(block):
            for piece in shard.tensor.pieces:
                if piece.canonical is not None and dtypes.setdefault(piece.canonical, shard.tensor.dtype) != shard.tensor.dtype:
                    raise CoverageError(f"{piece.canonical} arrives as {dtypes[piece.canonical]} and, in {shard.tensor.name} on rank "
                                        f"{shard.ranks[0]}, as {shard.tensor.dtype}; one checksum needs one dtype")
    return dtypes
