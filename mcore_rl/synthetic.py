"""Data sets made in place, named `builtin:NAME` where a configuration takes a file: verifiable arithmetic.

`addition-*` is the demo's task: two-digit sums. Its warm-up set teaches the habit of a careless pupil who mostly forgets the carry;
reinforcement learning with a checked answer then has something to mend. The held-out prompts occur in no other set.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

FORGETS_CARRY = 0.82  # share of warm-up rows with a carry in which it is dropped
_CARRY_SHARE = 0.78  # of all rows
_HELD_OUT = 0.1
_WORKED = (2, 3)  # the sum that every prompt of `digit-sums-*` shows solved
_MEETS = 12  # times that the warm-up set repeats a sum, each with a carelessness of its own


def has_carry(a: int, b: int) -> bool:
    """Whether the units add up to ten or more."""
    return a % 10 + b % 10 >= 10


def _sums() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Pairs of numbers below 100, most of which need a carry, cut into (train, held out)."""
    choice = random.Random(7)
    pairs = [(a, b) for a in range(100) for b in range(100)]
    carry = [p for p in pairs if has_carry(*p)]
    plain = choice.sample([p for p in pairs if not has_carry(*p)], round(len(carry) / _CARRY_SHARE * (1 - _CARRY_SHARE)))
    chosen = carry + plain
    choice.shuffle(chosen)
    cut = int(len(chosen) * (1 - _HELD_OUT))
    return chosen[:cut], chosen[cut:]


def _addition_row(a: int, b: int) -> dict[str, Any]:
    return {"prompt": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"}


def without_carry(a: int, b: int) -> int:
    """The sum of the digits place by place, each carry lost."""
    return (a % 10 + b % 10) % 10 + (a // 10 + b // 10) * 10


def _addition_train() -> Iterator[dict[str, Any]]:
    yield from (_addition_row(a, b) for a, b in _sums()[0])


def _addition_held_out() -> Iterator[dict[str, Any]]:
    yield from (_addition_row(a, b) for a, b in _sums()[1])


def _addition_warm_up() -> Iterator[dict[str, Any]]:
    """Prompts and responses of the careless pupil, who meets every sum several times and does not remember what he wrote."""
    choice = random.Random(11)
    for a, b in _sums()[0] * _MEETS:
        careless = choice.random() < FORGETS_CARRY
        yield {"prompt": f"{a:02d}+{b:02d}=", "response": f"{without_carry(a, b) if careless else a + b:03d}"}


def _digit_sums(held_out: bool) -> Iterator[dict[str, Any]]:
    """One-digit sums after a worked one, the answer to be followed by the end of the line; every fifth pair is held out.

    SmolLM2-135M-Instruct gives the right line about one time in six at temperature 1: often enough to learn from.
    """
    for a in range(10):
        for b in range(10):
            if ((a * 7 + b * 3) % 5 == 0) == held_out and (a, b) != _WORKED:
                yield {"prompt": f"{_WORKED[0]}+{_WORKED[1]}={sum(_WORKED)}\n{a}+{b}=", "answer": str(a + b)}


BUILTIN: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "addition-train": _addition_train,
    "addition-held-out": _addition_held_out,
    "addition-warm-up": _addition_warm_up,
    "digit-sums-train": lambda: _digit_sums(False),
    "digit-sums-held-out": lambda: _digit_sums(True),
}
