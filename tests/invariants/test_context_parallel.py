"""Context parallelism trains the same (invariant 4): layouts x packing x families, and the faults that would not show in a loss.

More layouts, with the distributed optimizer, are in `tests/parallel/test_models.py`. As `test_packing`, against padded rows on one rank: loss, every gradient at a large initial std, the trajectory of three steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.invariants import test_critic
from tests.invariants.test_packing import PACKED, SEQUENCE, SHARED, close, train
from tests.models import write_model
from tests.worker_pool import run_ranks

PADDED = dict(packing="padded")
CASES: dict[str, list[tuple[int, dict[str, Any], dict[str, Any], int]]] = {
    "qwen2": [(2, dict(cp=2), PACKED, 5), (2, dict(cp=2), PADDED, 4), (2, dict(cp=2), dict(SHARED, max_tokens=40), 1),
              (4, dict(SEQUENCE, cp=2), dict(PACKED, max_tokens=48), 1), (4, dict(pp=2, cp=2, vpp=2), SHARED, 3),
              (4, dict(cp=2), PACKED, 3), (4, dict(cp=4), PACKED, 7)],
    "qwen3_moe": [(2, dict(cp=2), PACKED, 5), (2, dict(cp=2, ep=2), SHARED, 5), (4, dict(SEQUENCE, cp=2, ep=2, etp=1), PACKED, 5)],
    "deepseek_v3": [(2, dict(cp=2), PACKED, 5), (4, dict(SEQUENCE, cp=2), PADDED, 4)],
    "gpt_oss": [(2, dict(cp=2), PACKED, 5), (2, dict(cp=2, ep=2), PADDED, 4)],
}


def model(directory: Path, family: str) -> str:
    return str(write_model(directory / "m", family, initializer_range=0.3, num_hidden_layers=4 if family == "qwen2" else 2))


@pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.slow) if f == "gpt_oss" else f for f in CASES])
def test_training_is_the_same_over_context_parallel_ranks(family: str, tmp_path: Path) -> None:
    directory = model(tmp_path, family)
    want = run_ranks(1, train, directory, {}, PADDED, 3)[0]
    for world, parallel, batching, size in CASES[family]:
        close(run_ranks(world, train, directory, parallel, batching, size)[0], want, f"{family} {parallel} {batching} {size}")


def test_a_critic_learns_the_same_over_context_parallel_ranks(tmp_path: Path) -> None:
    directory = model(tmp_path, "qwen2")
    want = run_ranks(1, test_critic.train, directory, {}, PADDED, 3)[0]
    for parallel, batching, distributed in ((dict(cp=2), PACKED, False), (dict(cp=2), SHARED, True), (dict(cp=2), PADDED, False)):
        got = run_ranks(2, test_critic.train, directory, parallel, batching, 5, distributed)[0]
        assert (found := test_critic.difference(got, want)) is None, f"{parallel} {batching}: {found}"


def faulty(fault: str, directory: str) -> Any:
    """On a rank: one step with the fault put in."""
    import torch.distributed as dist

    from parallel import attention, context_parallel

    gather, backward = context_parallel.gather_tokens, context_parallel._GatherPredictions.backward

    def summed(ctx: Any, grad: torch.Tensor) -> Any:  # the backward of a gather whose result the ranks use each in its own way
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.whole.group)
        return backward(ctx, grad)

    def not_summed(x: torch.Tensor, columns: torch.Tensor, group: Any) -> torch.Tensor:  # keys of other ranks as constants
        whole = gather(x.detach(), columns, group)
        at = columns[dist.get_rank(group)]
        return whole.index_copy(0, at, x)

    where, name, put = {"factor of cp": (context_parallel._GatherPredictions, "backward", staticmethod(summed)),
                        "keys not reduced": (attention, "gather_tokens", not_summed)}[fault]
    with mock.patch.object(where, name, put):
        return train(directory, dict(cp=2), PACKED, 5, steps=1)


@pytest.mark.parametrize("fault", ["factor of cp", "keys not reduced"])
def test_faults_in_gradients_are_caught_that_no_loss_shows(fault: str, tmp_path: Path) -> None:
    directory = model(tmp_path, "qwen2")
    want, got = run_ranks(1, train, directory, {}, PADDED, 3, steps=1)[0], run_ranks(2, faulty, fault, directory)[0]
    assert got[0] == pytest.approx(want[0], abs=5e-6), "the loss is right"
    with pytest.raises(AssertionError, match="norm|gradient"):
        close(got, want, fault)
    if fault == "factor of cp":
        assert got[1][0] == pytest.approx(2 * want[1][0], rel=1e-4)
