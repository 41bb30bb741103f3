"""A checkpoint holds the whole training state, whatever layout wrote it and whatever layout reads it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.mcore import model_config_of, read_metadata
from checkpoint.run_state import find_damage
from parallel.errors import UserError
from parallel.model_config import ModelConfig
from tests.checkpoint import trainers
from tests.models import write_model
from tests.worker_pool import run_ranks

TP2, DP2, PP2, VPP2 = {"tp": 2}, {}, {"pp": 2}, {"pp": 2, "vpp": 2}


@pytest.mark.parametrize(("layout", "options"), [
    (DP2, {}), (DP2, {"distributed_optimizer": False}), (TP2, {}), (PP2, {}), (VPP2, {}), (DP2, {"dtype": "bfloat16"}),
], ids=["dp2-distributed", "dp2-plain", "tp2", "pp2", "pp2-vpp2", "dp2-bf16"])
def test_the_same_layout_continues_bit_for_bit(layout: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
    directory = str(tmp_path / "step")
    expected = run_ranks(2, trainers.train_and_save, directory, layout, **options)
    resumed = run_ranks(2, trainers.load_and_train, directory, layout, **options)
    for (results, parameters), (differing, keys, results_after, parameters_after) in zip(expected, resumed, strict=True):
        assert not differing and any(key.startswith("optimizer.state.exp_avg_sq.") for key in keys)
        assert results_after == results
        assert parameters and all(torch.equal(parameters_after[name], tensor) for name, tensor in parameters.items())


@pytest.mark.parametrize(("written", "read", "options"), [
    (TP2, DP2, {}), (DP2, PP2, {}), (PP2, TP2, {}), (VPP2, TP2, {}),
    (TP2, PP2, {"distributed_optimizer": False}), (TP2, DP2, {"dtype": "bfloat16"}),
], ids=["tp2-dp2", "dp2-pp2", "pp2-tp2", "pp2vpp2-tp2", "tp2-pp2-plain", "tp2-dp2-bf16"])
def test_another_layout_reads_every_tensor(written: dict[str, Any], read: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
    directory = str(tmp_path / "step")
    (expected, _), _ = run_ranks(2, trainers.train_and_save, directory, written, **options)
    tolerance = 2e-4 if "dtype" not in options else 5e-2
    for differing, _, results, _ in run_ranks(2, trainers.load_and_train, directory, read, **options):
        assert not differing
        assert torch.allclose(torch.tensor(results), torch.tensor(expected), rtol=tolerance)


def test_another_number_of_ranks_reads_every_tensor(tmp_path: Path) -> None:
    directory = str(tmp_path / "step")
    run_ranks(4, trainers.train_and_save, directory, {"tp": 2, "pp": 2})
    (differing, _, _, _), = run_ranks(1, trainers.load_and_train, directory, {})
    assert not differing


def test_a_checkpoint_from_before_the_first_step_loads(tmp_path: Path) -> None:
    for expected, results in run_ranks(2, trainers.save_untrained_and_load, str(tmp_path / "step")):
        assert results == expected


def test_learning_rate_schedule_continues_and_this_runs_settings_win(tmp_path: Path) -> None:
    """Warm-up 3, cosine to step 10: the position is restored once; a doubled peak gives doubled rates, not the stored ones."""
    directory = str(tmp_path / "step")
    (expected, _), = run_ranks(1, trainers.train_and_save, directory, {})
    (_, _, results, _), = run_ranks(1, trainers.load_and_train, directory, {}, optimizer={"lr": 2e-2})
    assert [lr for _, lr in expected] == pytest.approx([1e-2 * 2 / 3, 1e-2])
    assert [lr for _, lr in results] == pytest.approx([2 * lr for _, lr in expected])


def test_a_checkpoint_of_another_model_or_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    directory = str(tmp_path / "step")
    run_ranks(2, trainers.train_and_save, directory, DP2)
    for options, message in (
        ({"num_layers": 2}, "decoder.layers.mlp.linear_fc2.weight of shape"),
        ({"tied": True}, "holds .*output_layer.weight"),
        ({"qkv_bias": True}, "lacks decoder.layers.self_attention.linear_qkv.bias"),
        ({"distributed_optimizer": False}, "optimizer.distributed must be what it was"),
    ):
        for said in run_ranks(2, trainers.load_wrong, directory, **options):
            assert said.startswith("UserError")
            assert re.search(message, said), said


@pytest.mark.parametrize(("kind", "message"), [("hole", "Invalid access pattern"), ("unwritable", "FileExistsError")])
def test_a_failing_save_is_an_error_on_every_rank(kind: str, message: str, tmp_path: Path) -> None:
    for said in run_ranks(2, trainers.save_with_bad_state, str(tmp_path / "step"), kind, timeout=60):
        assert said.startswith("CheckpointError") and message in said


def test_random_streams_of_every_rank_are_restored(tmp_path: Path) -> None:
    directory = str(tmp_path / "step")
    saved = run_ranks(2, trainers.random_streams, directory, TP2, True)
    restored = run_ranks(2, trainers.random_streams, directory, TP2, False)
    assert [draws for _, *draws in restored] == [draws for _, *draws in saved] and all(flag for flag, *_ in restored)
    assert saved[0][1:] != saved[1][1:]
    assert not any(flag for flag, *_ in run_ranks(2, trainers.random_streams, directory, DP2, False))


def test_a_model_directory_needs_nothing_else(tmp_path: Path) -> None:
    source = write_model(tmp_path / "hf", vocab_size=61)
    (source / "tokenizer.json").write_text("{}")
    directory = str(tmp_path / "model")
    written = run_ranks(2, trainers.write_model_directory, directory, str(source), TP2)[0]
    assert model_config_of(directory) == ModelConfig.from_directory(source, make_vocab_size_divisible_by=2)
    assert read_metadata(directory).dtype == "float32" and (tmp_path / "model/hf/tokenizer.json").read_text() == "{}"
    read = run_ranks(2, trainers.read_model_directory, directory, PP2)[0]
    assert set(read) == set(written) and all(trainers.equal(read[key], written[key]) for key in written)
    assert find_damage(tmp_path / "model") is None
    with pytest.raises(AssertionError, match="UserError.*exists and is not empty"):
        run_ranks(2, trainers.write_model_directory, directory, str(source), TP2)
    with pytest.raises(UserError, match="no model in Megatron's format"):
        model_config_of(source)
