"""A TensorRT-LLM engine over the fake package, on this process or on the ranks of a small world, and its synchronisation from HF files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from parallel.model_config import ModelConfig
from resharding.layout import canonical_blocks
from resharding.layouts import hf_layout
from resharding.sync import SyncReport, WeightSync
from tests.trtllm_rollout.driver.api import Api, api
from tests.trtllm_rollout.driver.fake_tensorrt_llm import Cluster, fake_tensorrt_llm
from trtllm_rollout.driver import placement
from trtllm_rollout.driver.engine import TensorRTEngine
from trtllm_rollout.driver.options import DriverOptions
from trtllm_rollout.driver.start import make_engine

TARGET = api("1.3.0rc15")


@contextmanager
def running(directory: str | Path, version: Api = TARGET, temperature: float = 1.0, tp: int = 1, moe_ep: int = 1,
            fake: dict[str, Any] | None = None, **options: Any) -> Iterator[tuple[TensorRTEngine, Cluster]]:
    """An engine over the whole world (`tp` ranks), not yet synchronised. Rank r is on the GPU named r."""
    rank = dist.get_rank() if tp > 1 else 0
    options = {"allow_version": "any", "start_timeout_s": 60, "update_timeout_s": 60, "generate_timeout_s": 60, **options}
    with fake_tensorrt_llm(version, **{"uuids": tuple(f"GPU-{i}" for i in range(tp)), **(fake or {})}) as cluster, \
            mock.patch.object(placement, "gpu_uuid", lambda device: str(rank)):
        engine = make_engine(ModelConfig.from_directory(directory), torch.float32, tuple(range(tp)), rank, 0,
                             dist.group.WORLD if tp > 1 else None, torch.device("cpu"), DriverOptions(**options), 8, temperature, moe_ep)
        try:
            yield engine, cluster
        finally:
            engine.close()


def sync(engine: TensorRTEngine, directory: str | Path, version: int = 1, scale: float = 1.0) -> SyncReport:
    """From the files, which rank 0 reads. `scale` multiplies all weights."""
    model = ModelConfig.from_directory(directory)
    rank = dist.get_rank() if dist.is_initialized() else 0
    source = {n: t * scale for n, t in load_file(Path(directory) / "model.safetensors").items()} if rank == 0 else {}
    return WeightSync([hf_layout(model, torch.float32, experts="split")], engine.layouts, canonical_blocks(model), rank).run(source, engine, version)


@contextmanager
def waiting_only(engine: TensorRTEngine, **seconds: float) -> Iterator[None]:
    """Shorter limits for what never answers; what does answer has all the time that a busy machine takes."""
    owner = engine._owner
    before = owner._timeouts  # type: ignore[attr-defined]
    owner._timeouts = replace(before, **seconds)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        owner._timeouts = before  # type: ignore[attr-defined]
