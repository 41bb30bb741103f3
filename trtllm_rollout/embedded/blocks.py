"""The block pool: who holds which block of the KV memory, and which blocks hold a known beginning of a text.

Plain data; no tensor is touched. A block is `block_size` consecutive tokens of one text, in all layers. It is free, held by one or
more texts, or idle: held by none but still the cached beginning of a text, and evicted (least recently used first) when a free one
is wanted. A cached block is found by the chain of all tokens up to its end (as in vLLM's v1 prefix cache); the chain is compared
token by token, so two texts never share by an accident of hashing.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence

ROOT = 0


class BlockPool:
    """`count` blocks of `block_size` tokens. Free blocks are given out lowest first, which keeps those in use close together."""

    def __init__(self, count: int, block_size: int, cached: bool = True) -> None:
        self.count, self.block_size, self._cached = count, block_size, cached
        self._holders = [0] * count
        self._free = list(range(count))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._chain: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # (node, tokens) -> (block, node after it)
        self._key: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._nodes = ROOT
        self.looked_up = self.found = 0  # tokens
        self.most = 0  # blocks held at once, since the cache was reset

    @property
    def available(self) -> int:
        """Blocks that `take` can give: the free and the idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks held by a text."""
        return self.count - self.available

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def take(self, count: int) -> list[int] | None:
        """`count` blocks for one holder; None, and nothing changed, where there are not so many."""
        if count > self.available:
            return None
        while len(self._free) < count:
            self._forget(next(iter(self._idle)))
        blocks = [heapq.heappop(self._free) for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
        self.most = max(self.most, self.used)
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """One holder gives these blocks up; the last first, so that the end of a cached text is evicted before its beginning."""
        for block in reversed(list(blocks)):
            if self._holders[block] < 1:
                raise ValueError(f"block {block} is released but nobody holds it")
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if block in self._key:
                    self._idle[block] = None
                else:
                    heapq.heappush(self._free, block)

    def lookup(self, ids: Sequence[int]) -> tuple[list[int], int]:
        """Cached blocks of the beginning of `ids`, held for the caller, and the chain's node after them.

        At least the last token is never found, because what follows it has to be computed.
        """
        blocks, node, size = [], ROOT, self.block_size
        if not self._cached:
            return blocks, node
        for start in range(0, len(ids) - size, size):
            hit = self._chain.get((node, tuple(ids[start:start + size])))
            if hit is None:
                break
            block, node = hit
            blocks.append(block)
        for block in blocks:
            self._holders[block] += 1
            self._idle.pop(block, None)
        self.looked_up += len(ids)
        self.found += len(blocks) * size
        return blocks, node

    def publish(self, node: int, ids: Sequence[int], block: int) -> int:
        """The held `block` holds the full block of tokens `ids` after chain `node`: returns the node after it."""
        if not self._cached:
            return ROOT
        key = (node, tuple(ids))
        if key not in self._chain:  # the same text may have been computed twice at the same time; the first one stays
            self._nodes += 1
            self._chain[key] = (block, self._nodes)
            self._key[block] = key
        return self._chain[key][1]

    def reset_cache(self) -> None:
        """Forget every cached beginning; held blocks stay held."""
        for block in list(self._key):
            self._forget(block)
        self.looked_up = self.found = 0
        self.most = self.used

    def _forget(self, block: int) -> None:
        del self._chain[self._key.pop(block)]
        if block in self._idle:
            del self._idle[block]
            heapq.heappush(self._free, block)
