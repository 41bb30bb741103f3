"""Where engines live in an SPMD job: which rank owns one, and what its processes see of the environment.

One engine for every `tp` consecutive ranks (a replica). With owner ray the replica's first rank holds the engine and makes every call;
the engine's workers are processes of their own on the replica's GPUs, and the other ranks lend them their shards of the weights.
"""

from __future__ import annotations

import atexit
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from parallel.errors import UserError
from parallel.model_config import ModelConfig

# a launcher's variables, with which a Ray worker would take itself for a rank of the job and wait for it
STRIPPED = ("PMI_", "PMIX_", "MPI_", "OMPI_", "SLURM_", "PRTE_", "I_MPI_", "TORCHELASTIC_")
STRIPPED_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SET = {
    "TLLM_RAY_FORCE_LOCAL_CLUSTER": "1",  # a cluster of this engine alone
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",  # workers see all of the replica's GPUs, as CUDA IPC needs
    "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL": "1",  # reloads in order on one stream, and at a lower peak of memory
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def worker_environment(environment: Mapping[str, str], devices: Sequence[int]) -> dict[str, str]:
    """The environment of an engine's processes: without the launcher's variables, with these GPUs (indices that this rank sees)."""
    kept = {k: v for k, v in environment.items() if not k.startswith(STRIPPED) and k not in STRIPPED_NAMES}
    visible = [d for d in kept.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
    names = [visible[d] if visible else str(d) for d in devices]
    return {**kept, **SET, "CUDA_VISIBLE_DEVICES": ",".join(names)}


@contextmanager
def starting_in(environment: Mapping[str, str]) -> Iterator[None]:
    """Processes started inside have this environment. Ours is as it was afterwards (this process's CUDA does not look at it again)."""
    before = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(environment)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def config_directory(model: ModelConfig) -> Path:
    """A directory with the model's config.json alone, removed at exit: the engine starts with random weights and is filled by a sync."""
    if not model.hf:
        raise UserError("rollout.engine is tensorrt_llm, but the model has no config.json of Hugging Face, from which it builds its own")
    directory = tempfile.TemporaryDirectory(prefix="mcore-rl-trtllm-")
    atexit.register(directory.cleanup)
    Path(directory.name, "config.json").write_text(json.dumps(model.hf))
    return Path(directory.name)


def gpu_uuid(device: torch.device) -> str:
    """A GPU's name that is the same in every process."""
    return plain_uuid(str(torch.cuda.get_device_properties(device).uuid))


def plain_uuid(name: str) -> str:
    """Without the prefix that NVML has and torch has not."""
    return name.removeprefix("GPU-").lower()


def match_workers(workers: Sequence[Mapping[str, Any]], trainers: Sequence[str]) -> list[int]:
    """Of every rank of the replica, the tp rank of the worker on its GPU. Raises UserError where the two do not match one to one."""
    tp_rank = {plain_uuid(worker["uuid"]): int(worker["tp_rank"]) for worker in workers}
    ours = [plain_uuid(uuid) for uuid in trainers]
    if len(tp_rank) != len(workers) or len(set(ours)) != len(ours) or set(ours) != set(tp_rank):
        raise UserError(f"TensorRT-LLM's workers run on the GPUs {sorted(tp_rank)}, the replica's ranks on {sorted(ours)}; every rank must share "
                        "its GPU with one worker. Give each rank a GPU of its own (run.device: cuda, one rank per GPU), and no other Ray cluster")
    return [tp_rank[uuid] for uuid in ours]
