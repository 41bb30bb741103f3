"""What owns TensorRT-LLM's engine for us: `ray_owner` and `inprocess_owner` are the two ways."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from parallel.model_config import ModelConfig
from resharding.layout import Layout
from trtllm_rollout.driver.agreed import Ranks
from trtllm_rollout.driver.options import DriverOptions
from trtllm_rollout.driver.seam.build import Features
from trtllm_rollout.driver.serving import Event, Key


@dataclass(frozen=True)
class Setup:
    """Everything an owner is made from. `sampler` is the one chosen; `max_seq_len` holds prompt and answer."""

    features: Features
    options: DriverOptions
    model: ModelConfig
    dtype: torch.dtype
    device: torch.device
    ranks: Ranks
    moe_ep: int
    replica: int
    max_batch_size: int
    max_seq_len: int
    sampler: str

    def engine_values(self) -> dict[str, Any]:
        """See `seam.build.engine_arguments`."""
        return {"tensor_parallel_size": len(self.ranks.ranks), "moe_expert_parallel_size": self.moe_ep, "moe": self.model.moe is not None,
                "dtype": str(self.dtype).removeprefix("torch."), "max_batch_size": self.max_batch_size, "max_seq_len": self.max_seq_len,
                "max_num_tokens": self.options.max_num_tokens, "sampler_type": self.sampler, "sleep": self.options.sleep,
                "free_gpu_memory_fraction": self.options.free_gpu_memory_fraction}


class Owner(Protocol):
    """An engine of one replica. Every rank calls every method in the same order, but for those marked: first rank.

    `layouts`: of its ranks, in rank order. `order`: its ranks in tp order; None where a layout is not what `trtllm_party` says. `route`: the
    way of the weights. `checked`: what is read back was read in the engine.
    """

    layouts: list[Layout]
    order: tuple[int, ...] | None
    route: str
    checked: bool

    def weights(self) -> dict[str, torch.Tensor]:
        """What an update writes into."""

    def begin_update(self) -> None:
        """No request is under way any more. Cached keys, values and prefixes are of no use from here on."""

    def hand_over(self) -> None:
        """What was written becomes the engine's weights; its prefix cache is reset."""

    def read_back(self) -> list[int]:
        """Checksums of the pieces of this rank's layout, of what the engine holds (`checked`) or of what was handed over."""

    def submit(self, key: Key, prompt: tuple[int, ...], sampling: dict[str, Any], streaming: bool) -> None:
        """First rank: start one sample."""

    def news(self) -> list[Event]:
        """First rank: wait for news of the samples under way. Raises EngineTimeout."""

    def abort(self, keys: Iterable[Key]) -> None:
        """First rank: end these samples; each still has a last event."""

    def sleep(self, tags: Sequence[str]) -> None: ...

    def wake(self, tags: Sequence[str]) -> None: ...

    def close(self) -> None: ...
