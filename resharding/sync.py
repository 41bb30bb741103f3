"""Trainer to engine: move all weights, check them, commit one version on every rank or on none."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from resharding.agreement import together
from resharding.checksum import piece_checksums, verify
from resharding.errors import CoverageError
from resharding.layout import Layout, check_tensors
from resharding.plan import Plan, make_plan
from resharding.transport import point_to_point


class WeightsReceiver(Protocol):
    """What an engine offers to a sync. Between `begin_update` and `commit` it refuses to generate."""

    def begin_update(self) -> None: ...

    def weights(self) -> Mapping[str, torch.Tensor]: ...

    def commit(self, version: int, checksums: Mapping[str, int]) -> None: ...


@dataclass(frozen=True)
class SyncReport:
    """`bytes` written into engine tensors on all ranks; `seconds` of the whole sync, of which `checksum_seconds`."""

    bytes: int
    seconds: float
    checksum_seconds: float
    version: int


class WeightSync:
    """Built once for a pair of parties; holds the plan. `rank` is this rank in the world, `group` holds all ranks of both."""

    def __init__(self, sources: Sequence[Layout], destinations: Sequence[Layout], shapes: Mapping[str, tuple[int, ...]],
                 rank: int = 0, group: dist.ProcessGroup | None = None, bucket_bytes: int = 64 << 20) -> None:
        """Raises CoverageError where the layouts do not cover the canonical tensors `shapes`."""
        self.plan: Plan = make_plan(sources, destinations, shapes)
        self.sources = tuple(sources)
        self.rank, self.group, self.bucket_bytes = rank, group, bucket_bytes
        self._source = next((x for x in sources if x.rank == rank), None)
        self._destination = next((x for x in destinations if x.rank == rank), None)
        self._dtypes = _destination_dtypes(destinations)

    def run(self, source_tensors: Mapping[str, torch.Tensor], engine: WeightsReceiver | None, version: int) -> SyncReport:
        """Collective over all ranks of both parties: bring the engine to `version` of the source weights.

        A rank outside the engine's party passes `engine=None`, one outside the trainer's passes no tensors. Raises on every
        rank where any rank fails (WeightsError where weights are at fault, SyncError for anything else); no rank has then
        committed, engines keep refusing to generate, and the next sync that succeeds recovers them.
        """
        started = time.perf_counter()
        what = f"weights version {version} is not committed"
        with together(what, self.group):
            weights = self._prepare(source_tensors, engine)
        checksums, checksum_seconds = self._move(what, source_tensors, weights)
        try:
            with together(what, self.group):
                if engine is not None:
                    engine.commit(version, checksums)
        except Exception:
            if engine is not None:  # engines that did commit must refuse like the one that could not
                engine.begin_update()
            raise
        return SyncReport(self.plan.bytes_written, time.perf_counter() - started, checksum_seconds, version)

    def _prepare(self, source_tensors: Mapping[str, torch.Tensor], engine: WeightsReceiver | None) -> Mapping[str, torch.Tensor]:
        weights: Mapping[str, torch.Tensor] = {}
        if engine is not None:
            engine.begin_update()
            weights = engine.weights()
        if self._destination is not None:
            check_tensors(self._destination, weights)
        if self._source is not None:
            check_tensors(self._source, source_tensors)
        return weights

    def _move(self, what: str, source_tensors: Mapping[str, torch.Tensor],
              weights: Mapping[str, torch.Tensor]) -> tuple[dict[str, int], float]:
        """Move, and compute the checksums of the source, in which replicas (tied copies, data parallel) must agree."""
        with together(what, self.group) as step:
            point_to_point.execute(self.plan, source_tensors, weights, self.rank, self.group, self.bucket_bytes)
            begun = time.perf_counter()
            values = piece_checksums(self._source, source_tensors, self._dtypes) if self._source is not None else []
            seconds = time.perf_counter() - begun
            step.payload = (self.rank, values)
        begun = time.perf_counter()
        gathered = dict(step.payloads)
        checksums = verify(self.sources, [gathered[layout.rank] for layout in self.sources])  # the same on every rank
        return checksums, seconds + time.perf_counter() - begun


def _destination_dtypes(destinations: Sequence[Layout]) -> dict[str, torch.dtype]:
    """The dtype in which each canonical tensor arrives: the checksum is taken of those values."""
    dtypes: dict[str, torch.dtype] = {}
    for layout in destinations:
        for local in layout.tensors:
            for piece in local.pieces:
                if piece.canonical is not None and dtypes.setdefault(piece.canonical, local.dtype) != local.dtype:
                    raise CoverageError(f"{piece.canonical} arrives as {dtypes[piece.canonical]} and, in {local.name} on rank "
                                        f"{layout.rank}, as {local.dtype}; one checksum needs one dtype")
    return dtypes
