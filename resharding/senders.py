"""Which holder of a region sends it to whom: local beats same host beats remote, and the senders share the work.

A pure function of who wants, who holds and who sits where, so every rank finds its own part of it without talking to the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache
from heapq import heapify, heapreplace

Pairs = tuple[tuple[int, int], ...]


class Senders:
    """All (source rank, destination rank) pairs of one region."""

    def __init__(self, pairs: Pairs) -> None:
        self.pairs = pairs
        by_rank: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for pair in pairs:
            for rank in set(pair):
                by_rank[rank].append(pair)
        self._by_rank = {rank: tuple(mine) for rank, mine in by_rank.items()}

    def of(self, rank: int | None) -> Pairs:
        """The pairs that `rank` takes part in (None: all)."""
        return self.pairs if rank is None else self._by_rank.get(rank, ())


def senders(wanting: tuple[int, ...], holding: tuple[int, ...], host_of: Callable[[int], int], turn: int) -> Senders:
    """Choose a sender for every rank of `wanting` among `holding`. `turn` rotates who begins, so that remainders spread."""
    return _assign(wanting, holding, host_of, turn % len(holding))


@lru_cache(maxsize=1 << 14)  # a model repeats few arrangements of ranks
def _assign(wanting: tuple[int, ...], holding: tuple[int, ...], host_of: Callable[[int], int], turn: int) -> Senders:
    own = set(holding)
    order = holding[turn:] + holding[:turn]
    hosts: dict[int, list[int]] = defaultdict(list)
    for rank in order:
        hosts[host_of(rank)].append(rank)
    load = dict.fromkeys(order, 0)
    chosen: dict[int, int] = {}
    remote: list[int] = []
    for rank in wanting:
        if rank in own:
            chosen[rank] = rank
        elif near := hosts.get(host_of(rank)):
            chosen[rank] = min(near, key=load.__getitem__)
            load[chosen[rank]] += 1
        else:
            remote.append(rank)
    heap = [(load[rank], i, rank) for i, rank in enumerate(order)]
    heapify(heap)
    for rank in remote:
        count, i, source = heap[0]
        chosen[rank] = source
        heapreplace(heap, (count + 1, i, source))
    return Senders(tuple((chosen[rank], rank) for rank in wanting))
