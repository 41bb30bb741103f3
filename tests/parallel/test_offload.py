"""Training state given up between phases: the memory really goes, everything comes back bit by bit, and nothing is used meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import write_model
from tests.parallel.test_models import SEQUENCES, open_model
from tests.worker_pool import run_ranks


def one_step(training: Any) -> None:
    import torch.distributed as dist

    from mcore_rl.exchange import Exchange
    from mcore_rl.policy import Policy

    Policy(training, Exchange(), dist.get_world_size()).update(SEQUENCES, range(8), 4, 1.0, lambda i, lp, h: (-lp.sum(), lp.sum().detach()))


def held(training: Any) -> dict[str, torch.Tensor]:
    """Copies of the weights, of the fp32 main parameters and of the moments, found without `Offload`."""
    out = {n: t.clone() for n, t in training.tensors.items()}
    for i, each in enumerate(getattr(training.optimizer, "chained_optimizers", [training.optimizer])):
        params = [p for group in each.optimizer.param_groups for p in group["params"]]
        out.update({f"main {i} {k}": p.detach().clone() for k, p in enumerate(params)})
        out.update({f"{name} {i} {k}": each.optimizer.state[p][name].clone() for k, p in enumerate(params) for name in ("exp_avg", "exp_avg_sq")})
    return out


def turns(directory: str, parallel: dict[str, Any], dtype: str, distributed: bool) -> None:
    """In a rank: two steps with everything given up between them equal two steps without."""
    plain, turned = (open_model(directory, parallel, True, dtype=dtype, lr=1e-2, weight_decay=0.1, distributed=distributed) for _ in range(2))
    memory = turned.memory
    assert memory.offload(["optimizer", "gradients"]) > 0  # before there are moments
    memory.restore(["gradients", "optimizer"])
    for _ in range(2):
        one_step(plain)
        one_step(turned)
        before = held(turned)
        size = memory.bytes("optimizer")
        weights = sum(p.nbytes for m in turned.modules for p in m.parameters())
        assert memory.offload(["optimizer", "gradients"]) == size + memory.bytes("gradients")
        with pytest.raises(RuntimeError, match="the optimizer and gradients of this model are offloaded"):
            turned.optimizer_step()
        with pytest.raises(RuntimeError, match="gradients of this model are offloaded"):
            one_step(turned)
        assert turned.tensors.keys() == plain.tensors.keys()  # weights are there
        assert memory.offload(["parameters", "optimizer"]) >= weights
        with pytest.raises(RuntimeError, match="parameters of this model are offloaded"):
            turned.tensors  # noqa: B018
        assert all(s.nbytes() == 0 for part in ("optimizer", "gradients", "parameters") for s, _ in memory._away[part])
        memory.restore(["parameters"])
        memory.restore(["optimizer", "gradients"])
        after = held(turned)
        assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
        assert not any(p.main_grad.any() for m in turned.modules for p in m.parameters())
    want = held(plain)
    assert all(torch.equal(after[k], want[k]) for k in want)


CASES = [("qwen2", {}, "bfloat16", True), ("qwen2", {}, "float32", True), ("qwen3_moe", dict(ep=2), "bfloat16", False),
         ("qwen3_moe", dict(ep=2), "float32", True), ("qwen2", dict(pp=2, vpp=2), "bfloat16", True), ("qwen2", dict(pp=2, vpp=2), "float32", False)]


@pytest.mark.parametrize(("family", "parallel", "dtype", "distributed"), CASES)
def test_all_comes_back_bit_by_bit(tmp_path: Path, family: str, parallel: dict[str, Any], dtype: str, distributed: bool) -> None:
    run_ranks(2, turns, str(write_model(tmp_path / "m", family, num_hidden_layers=4 if parallel.get("vpp") else 2)), parallel, dtype, distributed)


def measured(directory: str, spill: str, distributed: bool) -> tuple[int, int, int]:
    """In a rank: (bytes of the optimizer, resident memory that its leaving freed, resident memory that its return took)."""
    from parallel.memory import resident

    training = open_model(directory, {}, True, dtype="bfloat16", distributed=distributed)
    one_step(training)
    cpu = torch.device("cpu")
    training.memory.offload(["gradients"], spill)
    before = resident(cpu)
    size = training.memory.offload(["optimizer"], spill)
    without = resident(cpu)
    training.memory.restore(["optimizer"])
    again = resident(cpu)
    assert before is not None and without is not None and again is not None
    return size, before - without, again - without


@pytest.mark.parametrize("distributed", [True, False])
def test_resident_memory_falls_by_what_the_optimizer_held(tmp_path: Path, distributed: bool) -> None:
    """What the system counts, not what we free: at least 90 % of an optimizer of about 60 MB."""
    directory = str(write_model(tmp_path / "m", "qwen2", hidden_size=256, intermediate_size=1024, vocab_size=4096))
    (size, freed, back), = run_ranks(1, measured, directory, str(tmp_path), distributed)
    assert size > 50_000_000
    assert freed >= 0.9 * size, f"{freed} of {size} bytes"
    assert back <= 1.1 * size
    assert not [p for p in tmp_path.iterdir() if p.name != "m"]  # the file has no name


def test_a_file_that_was_cut_is_no_optimizer(tmp_path: Path) -> None:
    from parallel.offload import _File

    file, tensor = _File(tmp_path), torch.arange(100.0)
    file.save([tensor.untyped_storage()])
    file._file.truncate(17)
    with pytest.raises(OSError, match="ended after 17 of 400 bytes"):
        file.load([tensor.untyped_storage()])
