"""Who moves how much in a plan, for all ranks at once, without listing the copies: the figures of plans for thousands of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from resharding.layout import Party
from resharding.plan import Blocks, copied_regions
from resharding.senders import Senders


@dataclass(frozen=True)
class Traffic:
    """Bytes by rank, in the destination dtype, padding aside.

    `local`: from a rank's own tensors; `same_host` and `remote`: received from other ranks; `sent`: to other ranks, of which
    `sent_remote` to other hosts. `tensors` is the number of distinct canonical tensors that are moved.
    """

    tensors: int
    local: Counter[int] = field(default_factory=Counter)
    same_host: Counter[int] = field(default_factory=Counter)
    remote: Counter[int] = field(default_factory=Counter)
    sent: Counter[int] = field(default_factory=Counter)
    sent_remote: Counter[int] = field(default_factory=Counter)

    @property
    def bytes_needed(self) -> int:
        """What all destinations together hold, padding aside."""
        return self.local.total() + self.same_host.total() + self.remote.total()

    def received(self, rank: int) -> int:
        """Bytes that reach `rank` from others."""
        return self.same_host[rank] + self.remote[rank]

    def imbalance(self, groups: Sequence[Sequence[int]]) -> float:
        """The largest ratio, over groups of ranks, of the most that one of them sends to what they send on average.

        Ranks of different groups hold different tensors and cannot stand in for each other: by pipeline stage, for a trainer.
        """
        worst = 1.0
        for ranks in groups:
            mean = sum(self.sent[rank] for rank in ranks) / len(ranks)
            worst = max(worst, max(self.sent[rank] for rank in ranks) / mean if mean else 1.0)
        return worst

    def seconds(self, rank: int, local: float, same_host: float, remote: float) -> float:
        """Predicted seconds of `rank`'s part at the given bandwidths [bytes/s], both directions at once, the kinds side by side."""
        near = max(self.same_host[rank], self.sent[rank] - self.sent_remote[rank])
        return max(self.local[rank] / local, near / same_host, max(self.remote[rank], self.sent_remote[rank]) / remote)


def traffic(source: Party, destination: Party, blocks: Blocks | Sequence[Mapping[str, tuple[int, ...]]],
            host_of: Callable[[int], int] = lambda rank: rank // 8) -> Traffic:
    """The traffic of the plan between two parties. Raises CoverageError as `make_plan` does."""
    by_pairs: Counter[Senders] = Counter()
    names = set()
    for canonical, nbytes, pairs in copied_regions(source, destination, blocks, host_of):
        by_pairs[pairs] += nbytes
        names.add(canonical)
    out = Traffic(len(names))
    for pairs, nbytes in by_pairs.items():
        for src, dst in pairs.pairs:
            if src == dst:
                out.local[dst] += nbytes
                continue
            near = host_of(src) == host_of(dst)
            (out.same_host if near else out.remote)[dst] += nbytes
            out.sent[src] += nbytes
            if not near:
                out.sent_remote[src] += nbytes
    return out
