"""The loop's rollout on TensorRT-LLM: chosen by the configuration, refused with exit code 2 where it is not there, fed by the trainer's plan."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mcore_rl import rollout as rooms
from mcore_rl.cli import main
from mcore_rl.config import load_config
from mcore_rl.exchange import Exchange
from parallel.device import Device
from parallel.errors import UserError
from parallel.model_config import ModelConfig
from resharding.layouts.trtllm_engine import EngineMapping
from tests.models import reference_logits, write_model
from tests.trtllm_rollout.driver.fake_tensorrt_llm import fake_tensorrt_llm
from tests.trtllm_rollout.driver.harness import TARGET
from tests.worker_pool import run_ranks
from trtllm_rollout.driver import placement
from trtllm_rollout.driver.options import DriverOptions
from trtllm_rollout.protocol import Request, SamplingParams

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "configs/demo_cpu.yaml"
PROMPT = (5, 17, 99, 3)


def test_without_the_wheel_train_exits_with_2_and_names_version_and_alternative(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", str(DEMO), "rollout.engine=tensorrt_llm", "actor.parallel.tp=1", "rollout.tp=1"])
    text = capsys.readouterr().err
    assert "1.3.0rc15" in text and "rollout.engine: embedded" in text and "Traceback" not in text


def test_the_driver_s_keys_belong_to_its_engine() -> None:
    chosen = load_config(DEMO, ["rollout.engine=tensorrt_llm", "rollout.tensorrt_llm.owner=inprocess"], "train")
    assert chosen.rollout.driver == DriverOptions("inprocess")
    assert load_config(DEMO, [], "train").rollout.driver is None
    for override, words in (("rollout.tensorrt_llm.owner=ray", "has no effect: rollout.engine is embedded"),
                            ("rollout.tensorrt_llm.ownr=ray", "owner")):
        with pytest.raises(UserError, match=words):
            load_config(DEMO, [override], "train")
    with pytest.raises(UserError, match="must be > 0 and <= 1"):
        load_config(DEMO, ["rollout.engine=tensorrt_llm", "rollout.tensorrt_llm.free_gpu_memory_fraction=2"], "train")
    with pytest.raises(UserError, match="public with owner inprocess"):
        load_config(DEMO, ["rollout.engine=tensorrt_llm", "rollout.tensorrt_llm.owner=inprocess", "rollout.tensorrt_llm.weights=public"], "train")


def test_the_legacy_path_is_told_how_to_go_on(tmp_path: Path) -> None:
    from mcore_rl.commands.convert import build_command

    model = ModelConfig.from_directory(write_model(tmp_path, "llama", num_hidden_layers=1))
    assert build_command(Path("a b"), model, EngineMapping(2, 2)) == (
        "trtllm-build --checkpoint_dir 'a b' --output_dir 'a b-engine' --gemm_plugin auto --max_seq_len 256 --workers 4")


class Source:
    """What `Rollout.sync` reads of a trainer's model: here both ranks hold all of it, as data-parallel copies."""

    def __init__(self, directory: str, model: ModelConfig, world: int) -> None:
        from checkpoint.hf import read_hf
        from parallel.config import ParallelConfig
        from resharding.layout import empty_tensors
        from resharding.layouts import mcore_layout

        self.parallel, self.dtype, self.names = ParallelConfig(), torch.float32, "local"
        layout = mcore_layout(model, self.parallel, dist.get_rank(), world, torch.float32, "local")
        self.tensors = empty_tensors(layout)
        read_hf(directory, layout, self.tensors, model)


def _two_engines_over_four(directory: str) -> tuple[list[tuple[int, ...]], bool]:
    """Two replicas of two ranks; the workers of the second sit on its GPUs the other way round."""
    model, rank, world = ModelConfig.from_directory(directory), dist.get_rank(), dist.get_world_size()
    replica = rank // 2
    uuids = tuple(f"GPU-{2 * replica + i}" for i in range(2))
    with fake_tensorrt_llm(TARGET, uuids=uuids, order=(1, 0) if replica else ()) as cluster, \
            mock.patch.object(placement, "gpu_uuid", lambda device: str(rank)), mock.patch.object(rooms, "check_engine"):
        engines = rooms.Rollout(model, torch.float32, 2, 8, Device("cpu", "gloo"), Exchange(), rank, world,
                                driver=DriverOptions(start_timeout_s=60, update_timeout_s=60, generate_timeout_s=60))
        engines.sync(Source(directory, model, world), 1)  # type: ignore[arg-type]
        done = engines.generate([Request(i, PROMPT, SamplingParams(temperature=0, max_tokens=3)) for i in range(4)])
        good = not cluster.workers or torch.allclose(cluster.logits(PROMPT), reference_logits(directory, [list(PROMPT)])[0], atol=1e-5)
        engines.engine.close()
    return [c.token_ids for c in done], bool(good)


def test_the_trainer_s_plan_feeds_every_engine(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "llama", num_hidden_layers=2)
    results = run_ranks(4, _two_engines_over_four, str(directory))
    assert all(good for _, good in results) and len({str(tokens) for tokens, _ in results}) == 1
    assert len(results[0][0]) == 4 and len(set(results[0][0])) == 1
