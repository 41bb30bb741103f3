"""Copies between GPU ranks of one host: the receiver maps the sender's tensors (CUDA IPC) and copies from device to device.

Written against the documented API of torch.multiprocessing and tested on the CPU with a stand-in for the two functions that make and open
handles. It has not been run on a GPU: `benchmarks/gpu_session.sh` does that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Iterator

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_tensor

from resharding.boxes import slices
from resharding.errors import WeightsError
from resharding.plan import Copy, Plan
from resharding.transform import CAST, Transform
from resharding.transport import same_host
from resharding.transport.buckets import Buckets
from resharding.transport.in_place import MoveReport
from resharding.transport.memory import Offer, Place
from resharding.transport.messages import BUCKET, Pairs
from resharding.transport.peers import meet

DEVICE_ARGUMENT = 6  # of torch.multiprocessing.reductions.rebuild_cuda_tensor: `storage_device`


def execute(plan: Plan, source: Mapping[str, torch.Tensor], destination: Mapping[str, torch.Tensor], rank: int = 0,
            group: dist.ProcessGroup | None = None, bucket_bytes: int = BUCKET, transform: Transform = CAST,
            pairs: Pairs | None = None) -> MoveReport:
    """Run the plan on `rank`; at its first use on a group every rank of it must call this (see `peers.meet`).

    `pairs`: only these (source, destination) ranks. Tensors are on the ranks' current GPUs. Where parts lie is told once for a plan and
    the addresses of its source, handles each time. The sender's stream is finished before others read, and the sender returns when
    they have read. Casts happen at the source. A rank that fails keeps the protocol and raises at the end. Raises WeightsError where
    a rank does not see the other's GPU. Not run on a GPU yet.
    """
    peers = meet(group)
    for src, dst in {(c.src_rank, c.dst_rank) for c in plan.copies} if pairs is None else pairs:
        if src != dst and rank in (src, dst) and (dst, src) not in peers.sees:
            raise WeightsError(f"rank {dst} does not see the GPU of rank {src} (another host, or hidden by CUDA_VISIBLE_DEVICES); "
                               "use the point-to-point transport")
    return same_host.run(CudaIpc(torch.device("cuda", torch.cuda.current_device())), peers.control or group, plan, source, destination, rank,
                         bucket_bytes, transform, pairs)


def make_handle(storage: torch.UntypedStorage) -> Any:
    """A picklable handle of a CUDA storage. The storage must outlive the readers' use of it."""
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
    _, arguments = reduce_tensor(whole)
    return arguments, str(torch.cuda.get_device_properties(storage.device).uuid)


def open_handle(handle: Any) -> torch.Tensor:
    """The bytes of another process's storage. The GPU has another index here where CUDA_VISIBLE_DEVICES differs: it is found by name."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    arguments, name = handle
    names = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    return rebuild_cuda_tensor(*arguments[:DEVICE_ARGUMENT], names.index(name), *arguments[DEVICE_ARGUMENT + 1:])


class CudaIpc:
    """See `memory.Memory`. A storage is shared as its IPC handle, for one execution.

    A mapping that lasted would keep the weights of a trainer that moves them off the GPU until the next sync, and would show the old
    ones where new memory has the old address.
    """

    name, lasting = "cuda_ipc", False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @contextmanager
    def lent(self) -> Iterator[None]:
        self.settle()
        yield

    def offers(self, copy: Copy, part: torch.Tensor, reader: int) -> bool:
        return part.device == self.device

    def share(self, storage: torch.UntypedStorage) -> Any:
        return make_handle(storage)

    def share_buckets(self, buckets: Buckets) -> Any:
        return make_handle(buckets.tensor.untyped_storage()), buckets.size

    def open(self, offer: Offer, buckets: Buckets, slot: int) -> "_Reader":
        return _Reader(offer)

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


class _Reader:
    def __init__(self, offer: Offer) -> None:
        self.storages = [open_handle(handle) for handle in offer.storages]
        if offer.buckets is not None:
            handle, self.size = offer.buckets
            self.buckets = open_handle(handle)

    def bucket(self, number: int, nbytes: int) -> torch.Tensor:
        return self.buckets[number * self.size:number * self.size + nbytes]

    def read(self, copies: Sequence[tuple[Copy, Place]], destination: Mapping[str, torch.Tensor]) -> None:
        targets = [copy.dst_view.of(destination[copy.dst_tensor])[slices(copy.dst_box)] for copy, _ in copies]
        torch._foreach_copy_(targets, [self._part(copy, place) for copy, place in copies])

    def _part(self, copy: Copy, place: Place) -> torch.Tensor:
        size = copy.dtype.itemsize
        whole = self.storages[place.storage]
        offset = (place.offset + whole.storage_offset()) // size
        part = torch.empty(0, dtype=copy.dtype, device=whole.device)
        return part.set_(whole.untyped_storage(), offset, place.shape, tuple(s // size for s in place.strides))  # type: ignore[call-overload]
