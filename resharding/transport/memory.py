"""What a rank of a host needs to know to copy out of another's memory, and the two ways there are: see `shared_memory` and `cuda_ipc`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

from resharding.plan import Copy
from resharding.transport.buckets import Buckets


class Place(NamedTuple):
    """A part of one of the offered storages: `offset` and `strides` in bytes."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Offer(NamedTuple):
    """What one rank needs to reach another's memory.

    `places`: one for each copy of the pair, None where it is packed; instead of all, None where they are those of the last offer.
    """

    storages: tuple[Any, ...]
    places: tuple[Place | None, ...] | None
    buckets: Any


class Reader(Protocol):
    """One peer's memory, as its offer opens it."""

    def bucket(self, number: int, nbytes: int) -> torch.Tensor:
        """The first bytes of the peer's bucket."""
        ...

    def read(self, copies: Sequence[tuple[Copy, Place]], destination: Mapping[str, torch.Tensor]) -> None:
        """Copy out of the peer's tensors."""
        ...


class Memory(Protocol):
    """How the ranks of a host reach each other's memory.

    `lasting`: what was shared stays good for the next execution, if addresses are the same; otherwise it is let go at the end of each.
    """

    name: str
    device: torch.device
    lasting: bool

    def lent(self) -> AbstractContextManager[None]:
        """Entered while others read. What was written before must be there for them."""
        ...

    def offers(self, copy: Copy, part: torch.Tensor, reader: int) -> bool:
        """Whether `reader` takes this part of a source tensor out of it; otherwise it is packed."""
        ...

    def share(self, storage: torch.UntypedStorage) -> Any:
        """What a peer needs to reach a storage (pickled)."""
        ...

    def share_buckets(self, buckets: Buckets) -> Any: ...

    def open(self, offer: Offer, buckets: Buckets, slot: int) -> Reader:
        """`buckets`: this rank's own, of which the reader may use `slot` bytes while it reads."""
        ...

    def settle(self) -> None:
        """Return when all copies out of peers' memory are made."""
        ...
