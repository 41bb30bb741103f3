"""Rollout: engines beside the trainer, placed over the same ranks, fed by one plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from mcore_rl.exchange import Exchange
from parallel.device import Device, prepare_dtype
from parallel.errors import UserError
from parallel.model_config import ModelConfig
from parallel.training import TrainingModel
from resharding.layout import canonical_blocks
from resharding.layouts import mcore_party, trtllm_party
from resharding.sync import SyncReport, WeightSync
from trtllm_rollout.embedded.decoder import check_decodable
from trtllm_rollout.embedded.engine import EmbeddedEngine
from trtllm_rollout.protocol import Completion, Request


def check_engine_world(tp: int, world_size: int) -> None:
    """Refuse an engine size that does not fit the world. Raises UserError."""
    if world_size % tp:
        fits = [n for n in range(1, world_size + 1) if world_size % n == 0]
        raise UserError(f"rollout.tp is {tp}, which does not divide the world of {world_size} ranks; it may be {', '.join(map(str, fits))}, "
                        f"or start a multiple of {tp} ranks")


def check_engine_size(tp: int, world_size: int, model: ModelConfig) -> None:
    """Refuse an engine size that does not fit world or model, and a model that the engine cannot run. Raises UserError."""
    check_engine_world(tp, world_size)
    check_decodable(model)
    for name, size in (("num_attention_heads", model.num_heads), ("intermediate_size", model.intermediate_size)):
        if size % tp:
            raise UserError(f"rollout.tp is {tp}, which does not divide {name} {size} of the model; choose a divisor of it")
    if model.num_kv_heads % tp and tp % model.num_kv_heads:
        raise UserError(f"rollout.tp is {tp}; it and num_key_value_heads {model.num_kv_heads} of the model must divide one another")


class Rollout:
    """World_size / tp engines, each over tp consecutive ranks. All ranks call `generate` and `sync` together."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype, tp: int, max_batch_size: int, device: Device, exchange: Exchange,
                 rank: int, world_size: int) -> None:
        check_engine_size(tp, world_size, model)
        prepare_dtype(dtype, device)
        self.model, self.dtype, self.tp, self.exchange = model, dtype, tp, exchange
        self.rank, self.world_size = rank, world_size
        self.replica, self.replicas = rank // tp, world_size // tp
        group = None
        if tp > 1:  # every rank takes part in creating every group
            groups = [dist.new_group(list(range(i * tp, (i + 1) * tp)), backend=device.backend) for i in range(self.replicas)]
            group = groups[self.replica]
        self.engine = EmbeddedEngine(model, dtype, group, tp, rank % tp, rank, max_batch_size, device=device.torch)
        self._sync: WeightSync | None = None

    def sync(self, source: TrainingModel, version: int) -> SyncReport:
        """Bring every engine to the trainer's weights, as `version`, on all ranks or on none."""
        if self._sync is None:
            replicas = tuple(tuple(range(i * self.tp, (i + 1) * self.tp)) for i in range(self.replicas))
            self._sync = WeightSync(
                mcore_party(self.model, source.parallel, self.world_size, source.dtype, source.names),
                trtllm_party(self.model, replicas, self.dtype), canonical_blocks(self.model), self.rank)
        return self._sync.run(source.tensors, self.engine, version)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions of all requests on every rank, ordered by request and sample. Requests are dealt over the engines."""
        mine = self.engine.generate(requests[self.replica::self.replicas])
        leader = self.rank % self.tp == 0
        parts = self.exchange.gather(mine if leader else [])
        return sorted((c for part in parts for c in part), key=lambda c: (c.request_id, c.sample))
