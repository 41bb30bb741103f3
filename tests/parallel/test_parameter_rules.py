"""Which parameters train and which decay: against torch's AdamW on transformers' model with the same groups."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.errors import UserError
from parallel.model_config import ModelConfig
from parallel.parameter_rules import NO_WEIGHT_DECAY, check_patterns, frozen_in_some_layers
from tests.models import FAMILY_TINY, write_model
from tests.parallel.test_models import SEQUENCES, gathered, open_model
from tests.worker_pool import run_ranks

# eps: at 1e-4 the first updates of elements with hardly a gradient are rounding noise divided by little
OPTIMIZER: dict[str, Any] = dict(lr=2e-3, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.5, clip_grad=0.5)
LOWER = ("model.embed_tokens.*", "*.layers.[01].*")


def trained(directory: str, parallel: dict[str, Any], dtype: str, options: dict[str, Any]) -> Any:
    """On a rank: (canonical weights on rank 0, trainable elements here, moments here) after three steps."""
    import torch.distributed as dist

    from mcore_rl.exchange import Exchange
    from mcore_rl.policy import Policy
    from parallel.offload import _optimizers

    training = open_model(directory, parallel, True, dtype=dtype, **OPTIMIZER, **options)
    policy, total = Policy(training, Exchange(), dist.get_world_size()), sum(len(s) - 1 for s in SEQUENCES)
    for _ in range(3):
        policy.update(SEQUENCES, range(8), 3, 1.0, lambda i, lp, h: (-lp[1:].sum() / total, lp.sum().detach()))
    moments = sum(state["exp_avg"].numel() for each in _optimizers(training.optimizer) for state in each.state.values())
    trainable = sum(p.numel() for m in training.modules for p in m.parameters() if p.requires_grad)
    return gathered(training, {n: t.float() for n, t in training.tensors.items()}) if dtype == "float32" else None, trainable, moments


def reference(directory: str, frozen: tuple[str, ...], flat: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The same three steps by transformers, torch.optim.AdamW and torch's clipping."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    trained = {n: p for n, p in model.named_parameters() if not any(fnmatchcase(n, f) for f in frozen)}
    groups = [{"params": [p for n, p in trained.items() if any(fnmatchcase(n, f) for f in flat) == without], "weight_decay": 0.0 if without else 0.5}
              for without in (False, True)]
    adam, total = torch.optim.AdamW(groups, lr=2e-3, betas=(0.8, 0.9), eps=1e-3), sum(len(s) - 1 for s in SEQUENCES)
    for _ in range(3):
        model.zero_grad()
        for s in SEQUENCES:
            log_probs = model(torch.tensor([s])).logits[0, :-1].log_softmax(-1)
            (-log_probs.gather(1, torch.tensor(s[1:])[:, None]).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(list(trained.values()), 0.5)
        adam.step()
    return {n: p.detach() for n, p in model.named_parameters()}


CASES: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (1, {}, {}), (2, {}, dict(no_weight_decay=("*norm.weight", "*.layers.2.*", "*embed*"))), (2, dict(tp=2), dict(freeze=("*mlp*", "*.bias"))),
    (2, dict(pp=2), dict(freeze=LOWER, distributed=False)), (2, dict(pp=2), dict(freeze=LOWER)), (2, {}, dict(freeze=("*.layers.1.*", "*norm*")))]


def test_groups_and_frozen_parameters_are_those_of_torch(tmp_path: Path) -> None:
    """fp32. Of two stages the first has nothing to train in two cases. Frozen weights stay bit by bit, without moments."""
    directory = str(write_model(tmp_path / "m", "qwen2", tie_word_embeddings=False, initializer_range=0.3))
    from safetensors.torch import load_file

    before = load_file(Path(directory) / "model.safetensors")
    for world, parallel, options in CASES:
        frozen, flat = options.get("freeze", ()), options.get("no_weight_decay", ("*bias", "*norm.weight"))
        want, results = reference(directory, frozen, flat), run_ranks(world, trained, directory, parallel, "float32", options)
        for name, value in results[0][0].items():
            if any(fnmatchcase(name, f) for f in frozen):
                assert torch.equal(value, before[name]), (name, parallel, options)
            else:
                assert not torch.equal(value, before[name])
                torch.testing.assert_close(value, want[name], atol=2e-6, rtol=1e-5, msg=lambda m: f"{name} {parallel} {options}: {m}")
        shared = 1 if parallel else world if options.get("distributed", True) else 1  # moments are cut over data-parallel ranks
        assert sum(r[2] for r in results) == sum(r[1] for r in results) // shared
        if frozen == LOWER:
            assert results[0][1:] == (0, 0) and results[1][1] > 0


EVERYWHERE = ("model.embed_tokens.*", "*.layers.*")  # leaves the first stage nothing to train, and the last its norm and head


def test_a_stage_without_parameters_saves_and_resumes_in_bf16(tmp_path: Path) -> None:
    directory = str(write_model(tmp_path / "m", "qwen2", dtype="bfloat16"))
    results = run_ranks(2, resumed, directory, str(tmp_path / "c"))
    assert results[0] == 0 and results[1] > 0


def resumed(directory: str, target: str) -> int:
    """In a rank: two steps, a checkpoint and one more equal a fresh model that reads it and makes the one more."""
    from checkpoint.distributed import load_training, save_training

    first, second = (open_model(directory, dict(pp=2), True, dtype="bfloat16", freeze=EVERYWHERE, **OPTIMIZER) for _ in range(2))
    loss: Any = lambda i, lp, h: (-lp.sum(), lp.sum().detach())  # noqa: E731
    from mcore_rl.exchange import Exchange
    from mcore_rl.policy import Policy

    one, two = (Policy(t, Exchange(), 2) for t in (first, second))
    Path(target).mkdir(exist_ok=True)
    one.update(SEQUENCES, range(8), 4, 1.0, loss)
    save_training(Path(target), first)
    load_training(Path(target), second)
    for policy in (one, two):
        policy.update(SEQUENCES, range(8), 4, 1.0, loss)
    assert all(torch.equal(first.tensors[n], t) for n, t in second.tensors.items())
    return sum(p.numel() for m in first.modules for p in m.parameters() if p.requires_grad)


def test_layers_of_which_some_are_frozen_are_told_from_whole_stacks(tmp_path: Path) -> None:
    model = config(tmp_path, "qwen2")
    assert frozen_in_some_layers(model, LOWER) == "model.layers.1.input_layernorm.weight"
    assert frozen_in_some_layers(model, EVERYWHERE) is None and frozen_in_some_layers(model, ()) is None
    assert frozen_in_some_layers(config(tmp_path, "qwen3_moe"), ("*.experts.3.*",)) == "model.layers.3.mlp.experts.3.gate_proj.weight"


def config(tmp_path: Path, family: str) -> ModelConfig:
    return ModelConfig.from_directory(write_model(tmp_path / family, family))


@pytest.mark.parametrize("family", FAMILY_TINY)
def test_vectors_do_not_decay_by_default(tmp_path: Path, family: str) -> None:
    """Megatron's rule by shape, and our default by name, choose the same parameters of every family."""
    from parallel.parameter_rules import matches
    from resharding.layout import canonical_shapes

    for name, shape in canonical_shapes(config(tmp_path, family)).items():
        assert matches(name, NO_WEIGHT_DECAY) == (len(shape) == 1), name


def test_patterns_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    model = config(tmp_path, "qwen2")
    check_patterns(model, ["*.layers.3.*", "lm_head*", "model.embed_tokens.weight"], ["*q_proj*", "*k_proj*", "*v_proj*"])
    for freeze, flat, message in ((["*.embed_token.*"], [], r"actor.freeze: '\*.embed_token.\*' matches no parameter of the model; its names are model.embed"),
                                  ([], ["layers.0.*"], "actor.optimizer.no_weight_decay: 'layers.0"),
                                  (["*q_proj*"], [], "matches model.layers.0.self_attn.q_proj.weight and not model.layers.0.self_attn.k_proj.weight"),
                                  (["*"], [], "matches every parameter of the model")):
        with pytest.raises(UserError, match=message):
            check_patterns(model, freeze, flat)
