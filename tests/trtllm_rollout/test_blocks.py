"""Blocks: every one is free, held or cached, none is lost, and a cached beginning is found by exactly the texts that begin so."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_rollout.embedded.blocks import ROOT, BlockPool

SIZE = 4


def publish(pool: BlockPool, ids: tuple[int, ...], blocks: list[int]) -> None:
    node = ROOT
    for i in range(len(ids) // SIZE):
        node = pool.publish(node, ids[i * SIZE:(i + 1) * SIZE], blocks[i])


def test_blocks_are_given_lowest_first_and_only_whole_wishes_are_granted() -> None:
    pool = BlockPool(5, SIZE)
    assert pool.take(2) == [0, 1] and pool.take(2) == [2, 3]
    assert pool.take(2) is None and pool.available == 1, "a wish that cannot be met takes nothing"
    pool.release([1])
    assert pool.take(2) == [1, 4] and pool.used == 5
    with pytest.raises(ValueError, match="block 2 is released but nobody holds it"):
        pool.release([2, 2])


def test_a_text_finds_its_own_beginning_and_no_other() -> None:
    pool = BlockPool(10, SIZE)
    text = tuple(range(12))
    blocks = pool.take(3)
    publish(pool, text, blocks)
    assert pool.lookup(text)[0] == blocks[:2], "the last token is always computed: something must follow from it"
    assert pool.lookup((*text, 99))[0] == blocks
    assert pool.lookup((*text[:8], 99, 98, 97, 96, 95))[0] == blocks[:2]
    assert pool.lookup((99, *text))[0] == []
    assert pool.lookup((*text[4:8], *text[4:12]))[0] == [], "the same tokens after another beginning are another text"
    pool.release(blocks)
    assert pool.used == 3, "those who found them hold them"


def test_the_cache_keeps_what_nobody_holds_until_the_room_is_wanted_and_gives_up_the_end_first() -> None:
    pool = BlockPool(4, SIZE)
    text = tuple(range(12))
    blocks = pool.take(3)
    publish(pool, text, blocks)
    pool.release(blocks)
    assert pool.used == 0 and pool.available == 4
    assert pool.take(2) == [2, 3], "the free one and the last of the text"
    found, _ = pool.lookup((*text, 0))
    assert found == blocks[:2]
    assert pool.take(1) is None, "what is held is never evicted"
    pool.release(found)
    pool.reset_cache()
    assert pool.lookup((*text, 0))[0] == [] and pool.available == 2


def test_without_a_cache_nothing_is_found() -> None:
    pool = BlockPool(4, SIZE, cached=False)
    blocks = pool.take(2)
    publish(pool, tuple(range(8)), blocks)
    pool.release(blocks)
    assert pool.lookup(tuple(range(9))) == ([], ROOT) and pool.available == 4


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_block_is_lost_or_held_twice(data: st.DataObject) -> None:
    """Any sequence of texts that come, are computed and go, against a plain record of who holds what."""
    pool = BlockPool(data.draw(st.integers(1, 12)), SIZE)
    held: list[tuple[tuple[int, ...], list[int]]] = []
    content: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.integers(0, 5))
        if action <= 2:
            ids = tuple(data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=14)))
            found, _ = pool.lookup(ids)
            for i, block in enumerate(found):
                assert content[block] == ids[:(i + 1) * SIZE], "a found block holds this beginning"
            rest = pool.take(pool.blocks_for(len(ids)) - len(found))
            if rest is None:
                pool.release(found)
                continue
            assert not {b for _, blocks in held for b in blocks} & set(rest), "a block in use is given to nobody else"
            for i, block in enumerate(rest, len(found)):
                content[block] = ids[:(i + 1) * SIZE]
            publish(pool, ids, found + rest)
            held.append((ids, found + rest))
        elif action <= 4 and held:
            pool.release(held.pop(data.draw(st.integers(0, len(held) - 1)))[1])
        elif action == 5 and not held:
            pool.reset_cache()
        assert pool.used == len({b for _, blocks in held for b in blocks})
    for _, blocks in held:
        pool.release(blocks)
    assert pool.used == 0 and len(pool.take(pool.count) or []) == pool.count
