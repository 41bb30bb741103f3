"""Router replay: the experts that were chosen before are the ones that train, whatever the layout, the packing and the recomputation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.errors import UserError
from parallel.model_config import ModelConfig
from parallel.options import MoEOptions, TrainingOptions
from tests.invariants.test_packing import GROUPS, per_token, samples
from tests.models import write_model
from tests.parallel.test_models import gathered, open_model
from tests.runs import run_training, values, write_run
from tests.worker_pool import run_ranks

LAYERS, EXPERTS, TOP_K = 4, 8, 3


def choices() -> list[torch.Tensor]:
    """For each of `samples` an arbitrary choice of every token but the last; one of them is not known to its end. Equal prompts have equal ones."""
    ids, _ = samples()
    out = []
    for i, tokens in enumerate(ids):
        prompt = GROUPS[i // 3][0]
        parts = []
        for seed, count in ((100 + i // 3, prompt), (i, len(tokens) - prompt)):
            scores = torch.rand(count, LAYERS, EXPERTS, generator=torch.Generator().manual_seed(seed))
            parts.append(scores.topk(TOP_K, -1).indices)
        out.append(torch.cat(parts)[:-1].to(torch.int16))
    out[7] = out[7][:GROUPS[2][0] + 1]
    return out


def train(directory: str, parallel: dict[str, Any], packing: str, size: int, options: dict[str, Any]) -> Any:
    """On a rank: (loss, first gradients, log-probs, load metrics) with replayed choices, on rank 0."""
    import torch.distributed as dist

    from mcore_rl.exchange import Exchange
    from mcore_rl.policy import Policy
    from parallel.packing import Batching

    training = open_model(directory, parallel, True, lr=1e-12, clip_grad=0.0, distributed=False,
                          options=TrainingOptions(moe=MoEOptions(replay_experts=True), **options))
    policy = Policy(training, Exchange(), dist.get_world_size(), Batching(packing))  # type: ignore[arg-type]
    ids, masks = samples()
    count = sum(map(sum, masks))
    start, _ = policy.log_probs(ids, size + 1, 0.8, masks, choices())

    def loss(i: int, log_probs: torch.Tensor, entropy: torch.Tensor) -> Any:
        value = per_token(i, log_probs, entropy, torch.tensor(masks[i])).sum() / count
        return value, value.detach()

    reports, _, _ = policy.update(ids, range(len(ids)), size, 0.8, loss, masks, choices())
    several = len(training.modules) > 1
    grads = gathered(training, {**training.tensors, **{(f"chunk{i}." if several else "") + n: p.main_grad
                                for i, m in enumerate(training.modules) for n, p in m.named_parameters()}})
    load = policy.load()
    return (float(torch.stack(reports).double().sum()), grads, torch.cat(start), load) if dist.get_rank() == 0 else None


def reference(directory: str) -> tuple[float, dict[str, torch.Tensor], torch.Tensor]:
    """transformers with its routers told what to choose: the same loss, gradients and log-probs."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    told: list[torch.Tensor] = []

    def choose(layer: int) -> Any:
        def hook(_: Any, __: Any, out: Any) -> Any:
            logits, _, indices = out
            indices = torch.cat([told[0][:, layer].long(), indices[len(told[0]):]])
            chosen = logits.softmax(-1).gather(1, indices)
            return logits, chosen / chosen.sum(-1, keepdim=True), indices

        return hook

    for layer in range(LAYERS):
        model.model.layers[layer].mlp.gate.register_forward_hook(choose(layer))
    ids, masks = samples()
    total, rows = torch.zeros(()), []
    for i, (tokens, mask, told_here) in enumerate(zip(ids, masks, choices(), strict=True)):
        told[:] = [told_here]
        log_p = (model(torch.tensor([tokens])).logits[0, :-1] / 0.8).log_softmax(-1)
        log_probs = log_p.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        rows.append(torch.cat([torch.zeros(1), torch.where(torch.tensor(mask[1:]), log_probs.detach(), 0.0)]))
        total = total + per_token(i, log_probs, -(log_p.exp() * log_p).sum(-1), torch.tensor(mask[1:])).sum() / sum(map(sum, masks))
    total.backward()
    return total.item(), {n: g for name, p in model.named_parameters() for n, g in by_expert(name, p.grad)}, torch.cat(rows)


def by_expert(name: str, stacked: Any) -> list[tuple[str, torch.Tensor]]:
    """transformers stacks experts in memory; in files, and here, each has its own matrices."""
    block, _, last = name.rpartition(".")
    if not block.endswith(".experts"):
        return [(name, stacked)]
    names = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
    return [(f"{block}.{i}.{n}.weight", part) for i, one in enumerate(stacked) for n, part in zip(names, one.chunk(len(names)), strict=True)]


CUTS: list[tuple[int, dict[str, Any], str, int, dict[str, Any]]] = [
    (1, {}, "packed", 5, dict(recompute="full")), (1, {}, "shared_prompt", 12, {}), (2, dict(ep=2), "packed", 4, {}),
    (2, dict(tp=2, sequence_parallel=True, ep=2, etp=1), "shared_prompt", 6, dict(recompute="selective", recompute_modules=("moe",))),
    (2, dict(pp=2), "packed", 2, dict(recompute="full")), (2, dict(pp=2, vpp=2), "shared_prompt", 3, {}),
    (2, dict(cp=2), "packed", 3, dict(recompute="full"))]


def test_replayed_choices_train_as_in_transformers_however_work_is_split(tmp_path: Path) -> None:
    directory = str(write_model(tmp_path / "m", "qwen3_moe", initializer_range=0.3))
    loss, gradients, log_probs = reference(directory)
    changed = None
    for world, parallel, packing, size, options in CUTS:
        name = f"{parallel} {packing} {options}"
        got = run_ranks(world, train, directory, parallel, packing, size, options)[0]
        assert got[0] == pytest.approx(loss, abs=1e-5), name
        torch.testing.assert_close(got[2], log_probs, atol=1e-4, rtol=0, msg=lambda m: f"{name}: {m}")
        for key, value in gradients.items():
            off = ((got[1][key] - value).abs().max() / value.abs().max().clamp_min(1e-12)).item()
            assert off < 1e-4, f"gradient of {key}, {name}: off by {off:.1e} of its largest"
        if packing == "packed":  # a shared prompt counts once
            changed = changed or got[3]["moe/replay_changed"]
            assert got[3]["moe/replay_changed"] == pytest.approx(changed, abs=1e-3), name
    assert changed == pytest.approx(1 - TOP_K / EXPERTS, abs=0.05)  # an arbitrary choice agrees with the router's by chance


def test_a_run_repeats_the_choices_of_its_engine(tmp_path: Path) -> None:
    """In fp32 they are what the trainer would choose, and training is the same to the last digit. In bf16 some are not, and the
    trainer's log-probs are closer to the engine's with them."""
    sizes = ["rollout.tp=2", "rollout.moe_ep=2", "actor.parallel.ep=2", "run.steps=2"]
    rows = {}
    for dtype in ("float32", "bfloat16"):
        config = str(write_run(tmp_path / dtype, "qwen3_moe", model={"dtype": dtype}, rollout={"max_tokens": 12}))
        for replay in (False, True):
            name = f"{dtype}{replay}"
            rows[dtype, replay], weights = run_ranks(2, run_training, config, [f"run.dir={tmp_path}/{name}", f"actor.moe.replay_experts={replay}".lower(), *sizes],
                                                     with_weights=True)[0]
            rows[dtype, replay, "weights"] = weights
    for plain, replayed in zip(rows["float32", False], rows["float32", True], strict=True):
        assert replayed.pop("moe/replay_changed") == 0.0
        assert values(replayed) == values(plain)
    assert all(torch.equal(value, rows["float32", True, "weights"][name]) for name, value in rows["float32", False, "weights"].items())
    assert 0 < rows["bfloat16", True][0]["moe/replay_changed"] < 0.05
    assert rows["bfloat16", True][0]["actor/log_prob_gap_mean"] < rows["bfloat16", False][0]["actor/log_prob_gap_mean"]
    assert rows["bfloat16", True][0]["reward/mean"] == rows["bfloat16", False][0]["reward/mean"]  # the engine's part is the same


def test_replay_that_cannot_work_is_refused(tmp_path: Path) -> None:
    from mcore_rl.config import load_config

    moe = MoEOptions(replay_experts=True)
    with pytest.raises(UserError, match="qwen2 has no experts"):
        TrainingOptions(moe=moe).validate(ModelConfig.from_directory(write_model(tmp_path / "d", "qwen2")))
    with pytest.raises(UserError, match="packing is padded"):
        TrainingOptions(moe=moe).validate(ModelConfig.from_directory(write_model(tmp_path / "e", "qwen3_moe")), "padded")
    config = str(write_run(tmp_path / "run", "qwen3_moe"))
    for override in ("rollout.engine=tensorrt_llm", "rollout.replay=somewhere"):
        with pytest.raises(UserError, match="actor.moe.replay_experts.*choices of the embedded engine"):
            load_config(config, ["actor.moe.replay_experts=true", override], "train")
