"""Critics from a causal model's directory and from reward models, and back; case A01 b of ../shared/cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.value_head import value_model
from parallel.errors import UserError
from parallel.model_config import ModelConfig
from resharding.layout import canonical_shapes
from resharding.layouts import trtllm_layout
from resharding.layouts.trtllm_engine import trtllm_engine_layout
from tests.checkpoint.conversion import to_hf, to_mcore
from tests.invariants.test_critic import open_critic
from tests.models import write_model
from tests.parallel.test_models import gathered
from tests.worker_pool import run_ranks

IDS = [[5, 6, 7, 8, 150, 202, 1, 9], [3, 3, 40, 2, 11]]


def imported(directory: str, parallel: dict[str, Any], seed: int = 3, head_std: float = 0.0) -> Any:
    """On a rank: canonical weights of the critic, and its values [tokens] of IDS."""
    critic = open_critic(directory, parallel, seed, head_std)
    return gathered(critic.training, critic.training.tensors), critic.values(IDS, 2)


def reward_model(directory: Path, name: str = "score.weight", drop: str | None = None, announce: bool = True, **more: torch.Tensor) -> Path:
    """A qwen2 directory with a value head `name`, and config.json of a sequence classifier."""
    write_model(directory, "qwen2", num_hidden_layers=2)
    path, config = directory / "model.safetensors", json.loads((directory / "config.json").read_text())
    tensors = load_file(path)
    tensors = {k: v for k, v in tensors.items() if k != drop} | {name: torch.linspace(-1, 1, 64)[None]}
    tensors.update({k.replace("__", "."): v for k, v in more.items()})
    save_file(tensors, path, {"format": "pt"})
    if announce:
        config.update(architectures=["Qwen2ForSequenceClassification"], id2label={"0": "LABEL_0"}, pad_token_id=0)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("tied", [True, False])
def test_a01_b_a_causal_model_gives_its_layers_and_never_its_head(tmp_path: Path, tied: bool) -> None:
    directory = write_model(tmp_path / "m", "qwen2", tie_word_embeddings=tied)
    files = load_file(directory / "model.safetensors")
    assert ("lm_head.weight" in files) != tied
    for world, parallel in ((1, {}), (2, dict(pp=2)), (2, dict(tp=2))):
        weights, values = run_ranks(world, imported, str(directory), parallel)[0]
        assert weights.pop("score.weight").shape == (1, 64)
        assert weights.keys() == files.keys() - {"lm_head.weight"}
        assert all(torch.equal(weights[name], files[name]) for name in weights)
        assert all(not v.any() for v in values), "a head of zeros"


def test_a_new_head_depends_on_the_seed_alone(tmp_path: Path) -> None:
    directory = str(write_model(tmp_path / "m", "qwen2"))
    heads = [run_ranks(world, imported, directory, parallel, seed, 0.5)[0][0]["score.weight"]
             for world, parallel, seed in ((1, {}, 3), (2, dict(pp=2), 3), (2, dict(tp=2, sequence_parallel=True), 3), (1, {}, 4))]
    assert torch.equal(heads[0], heads[1]) and torch.equal(heads[0], heads[2]) and not torch.equal(heads[0], heads[3])
    assert 0.3 < heads[0].std() < 0.7


@pytest.mark.parametrize(("name", "announce"), [("score.weight", True), ("v_head.summary.weight", False), ("value_head.weight", False)])
def test_a_reward_model_gives_its_head(tmp_path: Path, name: str, announce: bool) -> None:
    directory = reward_model(tmp_path / "m", name, announce=announce, v_head__summary__bias=torch.zeros(1))
    assert value_model(directory)[1]
    weights, values = run_ranks(2, imported, str(directory), dict(pp=2))[0]
    assert torch.equal(weights["score.weight"], torch.linspace(-1, 1, 64)[None])
    if announce:  # transformers scores the last token of a sequence that is not padding: ours before one more token is the same state
        from transformers import AutoModelForSequenceClassification

        model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            want = [model(torch.tensor([ids[:-1]])).logits.item() for ids in IDS]
        assert [v[-1].item() for v in values] == pytest.approx(want, abs=1e-4)


def test_a_head_that_is_announced_and_missing_or_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    lacking = reward_model(tmp_path / "lacking", "other", drop=None)
    with pytest.raises(UserError, match=r"lacks score.weight.*Qwen2ForSequenceClassification"):
        value_model(lacking)
    cases = [(dict(score__weight=torch.zeros(2, 64)), r"score.weight has shape \(2, 64\), config.json asks for \(1, 64\)"),
             (dict(score__bias=torch.ones(1)), "score.bias, the bias of the value head, is not zero"),
             (dict(v_head__summary__weight=torch.zeros(1, 64)), "does not have: v_head.summary.weight"),
             (dict(drop="model.norm.weight"), "lacks 1 tensors of its config.*model.norm.weight")]
    for i, (changes, message) in enumerate(cases):
        directory = reward_model(tmp_path / str(i), **changes)  # type: ignore[arg-type]
        with pytest.raises(Exception, match=message):
            run_ranks(1, imported, str(directory), {})


def test_an_engine_refuses_a_value_model_by_name(tmp_path: Path) -> None:
    model, _ = value_model(reward_model(tmp_path / "m"))
    for layout in (lambda: trtllm_layout(model, 1, 0, 0, torch.float32), lambda: trtllm_engine_layout(model, 1, 1, 0, torch.float32)):
        with pytest.raises(UserError, match=r"value head \(score.weight\)"):
            layout()


def saved(source: str, target: str, parallel: dict[str, Any]) -> None:
    """On a rank: a critic with a head of its own as a model directory in Megatron's format."""
    from checkpoint.mcore import save_model

    save_model(target, open_critic(source, parallel, 5, 0.5).training, source)


def loaded(source: str, target: str, parallel: dict[str, Any]) -> Any:
    """On a rank: the weights of `target` in a critic that started from `source` with a head of zeros."""
    from checkpoint.mcore import load_model

    critic = open_critic(source, parallel)
    load_model(target, critic.training)
    return gathered(critic.training, critic.training.tensors)


def test_a_critic_goes_to_megatron_files_and_to_hugging_face_and_back(tmp_path: Path) -> None:
    """Written under PP2, read under TP2; converted to a directory that transformers loads as a classifier, and to Megatron's files again."""
    source = str(write_model(tmp_path / "m", "qwen2", num_hidden_layers=2))
    run_ranks(2, saved, source, str(tmp_path / "critic"), dict(pp=2))
    want = run_ranks(2, loaded, source, str(tmp_path / "critic"), dict(tp=2))[0]
    assert want["score.weight"].std() > 0.3
    to_hf(tmp_path / "critic", tmp_path / "hf")
    files = load_file(tmp_path / "hf" / "model.safetensors")
    assert files.keys() == want.keys() and all(torch.equal(files[n], want[n]) for n in want)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"] == ["Qwen2ForSequenceClassification"]
    model = ModelConfig.from_directory(tmp_path / "hf")
    assert (model.head, model.tied) == ("value", False) and canonical_shapes(model)["score.weight"] == (1, 64)
    from transformers import AutoModelForSequenceClassification

    held = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf", dtype=torch.float32).state_dict()
    assert all(torch.equal(held[n], want[n]) for n in want)
    to_mcore(tmp_path / "hf", tmp_path / "again")
    again = run_ranks(1, loaded, source, str(tmp_path / "again"), {})[0]
    assert all(torch.equal(again[n], want[n]) for n in want)


def test_the_first_row_of_a_vocabulary_is_not_taken_for_a_value_head(tmp_path: Path) -> None:
    """Megatron lets the output layer's first dimension differ, for padding; without a check a causal checkpoint would load."""
    source = write_model(tmp_path / "m", "qwen2", num_hidden_layers=2)
    to_mcore(source, tmp_path / "causal")
    with pytest.raises(Exception, match=r"not of this model.*output_layer.weight of shape \[1, 64\]"):
        run_ranks(1, loaded, str(source), str(tmp_path / "causal"), {})
