"""Communication that overlaps with computation changes nothing: gradients are reduced in buckets during the backward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config import load_config
from parallel.errors import UserError
from tests.runs import run_training, values, write_run
from tests.worker_pool import run_ranks

GRADIENTS = ["actor.optimizer.overlap_grad_reduce=true", "actor.optimizer.bucket_size=3000", "actor.optimizer.distributed=false"]
# family, ranks, parallel sizes, overlap, other options: two updates a step and several micro-batches an update throughout
CASES: list[tuple[str, int, list[str], list[str], list[str]]] = [
    ("qwen2", 2, [], GRADIENTS, []),
    ("qwen2", 4, ["actor.parallel.pp=2", "actor.parallel.vpp=2"], GRADIENTS, []),
    ("qwen3_moe", 2, ["actor.parallel.ep=2"], GRADIENTS, ["actor.recompute=full"]),
]


@pytest.mark.parametrize("case", [pytest.param(n, marks=[pytest.mark.slow] if n == 1 else []) for n in range(len(CASES))])
def test_a_run_is_the_same_with_overlap(case: int, tmp_path: Path) -> None:
    """Every metric and every weight, bit by bit; and a run that is resumed in the other way."""
    family, world, sizes, overlap, options = CASES[case]
    path = str(write_run(tmp_path, family, run={"steps": 2}, checkpoint={"every": 1, "keep": 2}, actor={"updates_per_step": 2, "micro_batch_size": 2}))
    want, weights = run_ranks(world, run_training, path, [f"run.dir={tmp_path / 'plain'}", *sizes, *options, *[o for o in overlap if "distributed" in o]], True)[0]
    got, other = run_ranks(world, run_training, path, [f"run.dir={tmp_path / 'overlap'}", *sizes, *options, *overlap], True)[0]
    run_ranks(world, run_training, path, [f"run.dir={tmp_path / 'resumed'}", *sizes, *options, *overlap, "run.steps=1"])
    resumed, again = run_ranks(world, run_training, path, [f"run.dir={tmp_path / 'resumed'}", *sizes, *options, *[o for o in overlap if "distributed" in o]], True)[0]
    assert [values(row) for row in got] == [values(row) for row in want]
    assert [values(row) for row in resumed] == [values(row) for row in want]
    for name, tensor in weights.items():
        assert (other[name] == tensor).all() and (again[name] == tensor).all(), name


def test_buckets_without_overlap_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="all gradients are reduced at once"):
        load_config(str(write_run(tmp_path)), ["actor.optimizer.bucket_size=9"], "train")


def test_overlap_with_the_distributed_optimizer_is_refused(tmp_path: Path) -> None:
    """Megatron-Core 0.16 warns, and saves optimizer state with holes, where a buffer has several padded buckets."""
    with pytest.raises(UserError, match="lose optimizer state"):
        load_config(str(write_run(tmp_path)), ["actor.optimizer.overlap_grad_reduce=true"], "train")
