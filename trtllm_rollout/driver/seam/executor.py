"""The PyTorch-backend executor inside this process: internal names, pinned to the versions they were read in.

Upstream creates one GenerationExecutorWorker in every MPI rank of an engine (`executor/worker.py:worker_main`); rank 0 takes requests, and
the others follow in the executor's own loop. The same is done here on the ranks of a replica, whose communicator takes the place of
MPI.COMM_WORLD (`_utils.set_mpi_comm`).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from parallel.errors import UserError
from trtllm_rollout.driver.seam.build import Features, find

READ = ("1.3.0rc10", "1.3.0rc13", "1.3.0rc14", "1.3.0rc15")  # main of spring 2026, where the names below were read, brackets them


def communicator(replica: int, tp: int) -> Any:
    """The MPI communicator of this replica's ranks, set as tensorrt_llm's own. Raises UserError where MPI has other ranks than torch."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    torch_world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if world.Get_size() != torch_world and tp > 1:
        raise UserError(f"rollout.tensorrt_llm.owner is inprocess with rollout.tp {tp}, but MPI sees {world.Get_size()} ranks of {torch_world}; "
                        "start with mpirun or srun --mpi=pmix (mcore-rl train does under either), or set owner: ray")
    part = world.Split(color=replica, key=world.Get_rank()) if world.Get_size() == torch_world else MPI.COMM_SELF
    find("set_mpi_comm", "tensorrt_llm._utils")(part)
    return part


def check_version(features: Features) -> None:
    """Raises UserError for a build in which the internal names were not read."""
    if features.version not in READ:
        raise UserError(f"rollout.tensorrt_llm.owner is inprocess, whose internal names were read in tensorrt_llm {READ[0]} to {READ[-1]}, not "
                        f"in {features.version}; set owner: ray")


class Executor:
    """This rank's part of an engine. `engine` is its PyExecutor."""

    def __init__(self, features: Features, arguments: dict[str, Any]) -> None:
        check_version(features)
        directory = Path(arguments["model"])
        worker = find("GenerationExecutorWorker", "tensorrt_llm.executor.worker")
        llm_args = find("TorchLlmArgs", "tensorrt_llm.llmapi.llm_args", "tensorrt_llm.llmapi")(**arguments)
        known = inspect.signature(worker).parameters
        given = {"engine": directory, "hf_model_dir": directory, "llm_args": llm_args, "tokenizer": None, "is_llm_executor": True}
        self._worker = worker(**{name: value for name, value in given.items() if name in known})

    @property
    def engine(self) -> Any:
        return self._worker.engine

    def generate(self, prompt: Sequence[int], sampling: Any, streaming: bool) -> Any:
        """On the replica's first rank: a result that is awaited, iterated (where streaming) and aborted."""
        return self._worker.generate_async(prompt_token_ids=list(prompt), sampling_params=sampling, streaming=streaming)

    def shutdown(self) -> None:
        self._worker.shutdown()
