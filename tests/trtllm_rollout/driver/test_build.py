"""Which tensorrt_llm is accepted, what is seen of it, where engines live, and that only the seam touches it."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parallel.errors import UserError
from parallel.model_config import ModelConfig
from resharding.layouts import trtllm_layout
from tests.models import write_model
from tests.trtllm_rollout.driver.api import Api, api, apis
from tests.trtllm_rollout.driver.fake_tensorrt_llm import fake_tensorrt_llm
from trtllm_rollout.driver import placement
from trtllm_rollout.driver.names import bind, why_not_rank_local
from trtllm_rollout.driver.options import DriverOptions
from trtllm_rollout.driver.seam import build
from trtllm_rollout.driver.start import check_engine

ROOT = Path(__file__).resolve().parents[3]


def test_only_the_seam_knows_tensorrt_llm() -> None:
    """No import of it elsewhere, in whatever form, and no call by a name in text."""
    seam = ROOT / "trtllm_rollout/driver/seam"
    for path in [p for room in ("trtllm_rollout", "mcore_rl", "resharding", "parallel", "checkpoint", "launch") for p in (ROOT / room).rglob("*.py")]:
        tree = ast.parse(path.read_text())
        imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        imported |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        texts = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        touches = any(re.match(r"tensorrt_llm(\.|$)", name) for name in imported) or any(re.fullmatch(r"tensorrt_llm\.[\w.]+", t) for t in texts)
        assert not touches or path.is_relative_to(seam), path


def test_a_missing_package_is_refused_with_what_to_install() -> None:
    with pytest.raises(UserError, match=r"not installed; install tensorrt_llm 1\.3\.0rc15 .*rollout\.engine: embedded"):
        build.load()


def test_other_versions_are_refused_by_name_unless_allowed() -> None:
    with fake_tensorrt_llm(api("1.2.1")):
        for allowed in (None, "1.2.0"):
            with pytest.raises(UserError, match=r"tensorrt_llm 1\.2\.1 is installed, .* is written for 1\.3\.0rc15.*allow_version: 1\.2\.1"):
                build.load(allowed)
        assert build.load("1.2.1") == build.load("any")
    with fake_tensorrt_llm(api("1.3.0rc15")):
        assert build.load().version == "1.3.0rc15"


@pytest.mark.parametrize("version", apis(), ids=lambda a: f"{a.version}-{len(a.arguments)}")
def test_features_are_detected(version: Api) -> None:
    with fake_tensorrt_llm(version):
        found = build.load("any")
        new = version.version != "1.2.1"
        assert found.sleep == ("sleep_config" if new else "enable_sleep") and found.memory_tags("weights") == ("model_weights" if new else "model",)
        assert found.pause == (version.version in ("1.3.0rc15", "1.3.0rc21")) and found.guided_reload == (version.version == "1.3.0rc21")
        assert found.log_prob_modes == (("raw",) if new else ())
        values = dict(tensor_parallel_size=4, moe_expert_parallel_size=2, moe=True, dtype="bfloat16", max_batch_size=8, max_seq_len=99,
                      max_num_tokens=512, sampler_type="TorchSampler", free_gpu_memory_fraction=0.5, sleep=True)
        arguments = build.engine_arguments(found, "/model", values)
        assert arguments.keys() <= version.arguments and (arguments["moe_tensor_parallel_size"], arguments["moe_expert_parallel_size"]) == (2, 2)
        assert arguments["max_input_len"] == 99 and arguments["load_format"] == "dummy"
        with pytest.raises(UserError, match="SamplingParams has no colour"):
            build.make_sampling_params(found, {"colour": 1})
        with pytest.raises(UserError, match="no argument flavour"):
            build.engine_arguments(found, "/model", {**values, "flavour": 1})


def test_a_build_without_tags_cannot_sleep() -> None:
    features = build.Features("9", "enable_sleep", frozenset({"model"}), False, frozenset(), (), frozenset(), False)
    with pytest.raises(UserError, match=r"no memory tag for kv_cache .*sleep: false"):
        features.memory_tags("kv_cache")


def test_a_run_on_the_cpu_is_refused(tmp_path: Path) -> None:
    model = ModelConfig.from_directory(write_model(tmp_path, "llama", num_hidden_layers=1))
    with fake_tensorrt_llm(api("1.3.0rc15")):
        with pytest.raises(UserError, match="runs on CUDA devices"):
            check_engine(model, DriverOptions(), 1, torch.device("cpu"))
        with pytest.raises(UserError, match="stays within a host"):
            check_engine(model, DriverOptions(), 4, torch.device("cuda", 0), 2)


def test_parameters_that_do_not_fit_are_named(tmp_path: Path) -> None:
    model = ModelConfig.from_directory(write_model(tmp_path, "llama", num_hidden_layers=1))
    layout = trtllm_layout(model, 2, 1, 1, torch.float32)
    good = {t.name: (t.shape, t.dtype) for t in layout.tensors}
    clipped = {**good, "lm_head.weight": ((101, 64), torch.float32)}  # 203 rows over 2 ranks: the last one has 101 and a row of padding
    assert bind(clipped, layout)[0]["lm_head.weight"].shape == (101, 64)
    for changes, words in (({"lm_head.weight": ((100, 64), torch.float32)}, "lm_head.weight is"), ({"x": ((1,), torch.float32)}, "goes into x"),
                           ({"model.norm.weight": ((64,), torch.bfloat16)}, "model.norm.weight is .*bfloat16")):
        with pytest.raises(UserError, match=words):
            bind({**good, **changes}, layout)
    with pytest.raises(UserError, match="model.norm.weight is missing"):
        bind({n: p for n, p in good.items() if n != "model.norm.weight"}, layout)


def test_latent_attention_is_not_written_past_the_loader(tmp_path: Path) -> None:
    model = ModelConfig.from_directory(write_model(tmp_path, "deepseek_v3"))
    assert "deepseek_v3" in (why_not_rank_local(model) or "")


def test_workers_see_the_gpus_and_not_the_launcher() -> None:
    environment = {"PATH": "/bin", "SLURM_PROCID": "3", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "2", "PMI_RANK": "2", "MPI_X": "1", "RANK": "3",
                   "WORLD_SIZE": "8", "MASTER_ADDR": "h", "CUDA_VISIBLE_DEVICES": "4,5,6,7", "MPICH": "kept"}
    seen = placement.worker_environment(environment, [2, 3])
    assert seen == {"PATH": "/bin", "MPICH": "kept", **placement.SET, "CUDA_VISIBLE_DEVICES": "6,7"}
    before = dict(os.environ)
    with placement.starting_in(seen):
        assert dict(os.environ) == seen
    assert dict(os.environ) == before


def test_workers_are_matched_by_gpu() -> None:
    workers = [{"uuid": "GPU-AB", "tp_rank": 0}, {"uuid": "GPU-CD", "tp_rank": 1}]
    assert placement.match_workers(workers, ["cd", "ab"]) == [1, 0]
    for ours in (["ab", "ab"], ["ab", "ef"], ["ab"]):
        with pytest.raises(UserError, match="one worker"):
            placement.match_workers(workers, ours)


_OWNER = """
import os, signal, sys
sys.path.insert(0, {root!r})
from trtllm_rollout.driver.closing import Closing
closing = Closing(lambda: print("closed", flush=True))
{how}
"""


@pytest.mark.parametrize(("how", "code"), [("", 0), ("raise RuntimeError", 1), ("closing.close()", 0),
                                           ("os.kill(os.getpid(), signal.SIGTERM)\nwhile True: signal.pause()", -signal.SIGTERM)])
def test_an_engine_is_closed_once_however_its_owner_ends(how: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", _OWNER.format(root=str(ROOT), how=how)], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("closed\n", code), done.stderr
