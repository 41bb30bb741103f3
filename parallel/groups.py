"""Process groups per role: Megatron's `parallel_state`, one snapshot per parallel layout, entered as a context."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from parallel.config import ParallelConfig

_cache: dict[ParallelConfig, RoleGroups] = {}
_world: Any = None  # the world that the cached groups belong to


@dataclass(eq=False)
class RoleGroups:
    """The state of `megatron.core.parallel_state` (and of its RNG tracker) for one layout of the world."""

    parallel: ParallelConfig
    state: dict[str, Any]
    tracker: Any

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, Megatron-Core sees this layout; contexts nest."""
        outer, outer_tracker = _snapshot(), _tracker()
        _restore(self.state, self.tracker)
        try:
            yield
        finally:
            _restore(outer, outer_tracker)


def role_groups(parallel: ParallelConfig, seed: int) -> RoleGroups:
    """Create the groups of a layout (a collective over the world), or reuse them where another role has the same one."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random as tp_random

    global _world
    if _world is not dist.group.WORLD:
        forget_groups()
        _world = dist.group.WORLD
    if (found := _cache.get(parallel)) is not None:
        return found
    outer, outer_tracker = _snapshot(), _tracker()
    _restore({name: None for name in outer}, None)
    parallel_state.initialize_model_parallel(
        parallel.tp, parallel.pp, parallel.vpp, context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep, expert_tensor_parallel_size=parallel.etp)
    tp_random.model_parallel_cuda_manual_seed(seed, te_rng_tracker=False, force_reset_rng=True)
    groups = RoleGroups(parallel, _snapshot(), _tracker())
    _restore(outer, outer_tracker)
    _cache[parallel] = groups
    return groups


def forget_groups() -> None:
    """Let go of the groups of a world that was left: gloo keeps three threads for each group that anything refers to."""
    from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding

    global _world
    _cache.clear()
    _world = None
    for rope in (RotaryEmbedding, YarnRotaryEmbedding):
        rope.forward.cache_clear()  # its keys are modules of all models that ran, and those hold a group


def _snapshot() -> dict[str, Any]:
    from megatron.core import parallel_state

    return {name: value for name, value in vars(parallel_state).items() if name.isupper() and name.startswith("_")}


def _tracker() -> Any:
    from megatron.core.tensor_parallel import random as tp_random

    return tp_random._CUDA_RNG_STATE_TRACKER, tp_random._CUDA_RNG_STATE_TRACKER_INITIALIZED


def _restore(state: dict[str, Any], tracker: Any) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random as tp_random

    vars(parallel_state).update(state)
    tp_random._CUDA_RNG_STATE_TRACKER, tp_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = tracker or (None, False)
