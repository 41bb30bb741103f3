"""Rollout: engines beside the trainer, placed over the same ranks, fed by one plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mcore_rl.exchange import Exchange
from parallel.device import Device, prepare_dtype
from parallel.environment import read_environment
from parallel.errors import UserError
from parallel.model_config import ModelConfig
from parallel.training import TrainingModel
from resharding.layout import Layout, Party, canonical_blocks
from resharding.layouts import mcore_party, trtllm_party
from resharding.layouts.fp8 import fp8_blocks, fp8_party, fp8_weights, scaled_party
from resharding.sync import SyncReport, WeightSync
from resharding.transform import Fp8Source
from trtllm_rollout.driver.engine import TensorRTEngine
from trtllm_rollout.driver.options import DriverOptions
from trtllm_rollout.driver.seam.build import load as load_tensorrt_llm
from trtllm_rollout.driver.start import check_engine, make_engine
from trtllm_rollout.embedded.engine import EmbeddedEngine
from trtllm_rollout.protocol import Completion, Request


def check_engine_world(tp: int, world_size: int, driver: DriverOptions | None = None) -> None:
    """Refuse an engine size that does not fit the world, and TensorRT-LLM (where `driver` asks for it) that is not there. Raises UserError."""
    if driver is not None:
        load_tensorrt_llm(driver.allow_version)
    if world_size % tp:
        fits = [n for n in range(1, world_size + 1) if world_size % n == 0]
        raise UserError(f"rollout.tp is {tp}, which does not divide the world of {world_size} ranks; it may be {', '.join(map(str, fits))}, "
                        f"or start a multiple of {tp} ranks")


def check_engine_size(tp: int, world_size: int, model: ModelConfig, driver: DriverOptions | None = None, device: Device | None = None,
                      moe_ep: int = 1, fp8: bool = False) -> None:
    """Refuse an engine size that does not fit world or model, and a model that the engine cannot run. Raises UserError."""
    check_engine_world(tp, world_size)
    if driver is not None:
        check_engine(model, driver, tp, device.torch if device else None, read_environment().local_world_size)
    check_expert_ranks(moe_ep, tp, model)
    dense = model.intermediate_size if len(model.moe_layers) < model.num_layers else tp
    shared = model.moe.shared_intermediate_size if model.moe else tp
    for name, size in (("num_attention_heads", model.num_heads), ("intermediate_size", dense), ("the size of the shared experts,", shared)):
        if size % tp:
            raise UserError(f"rollout.tp is {tp}, which does not divide {name} {size} of the model; choose a divisor of it")
    if model.num_kv_heads % tp and tp % model.num_kv_heads:
        raise UserError(f"rollout.tp is {tp}; it and num_key_value_heads {model.num_kv_heads} of the model must divide one another")
    if fp8:
        check_fp8_blocks(model, tp, moe_ep)


def check_expert_ranks(moe_ep: int, tp: int, model: ModelConfig) -> None:
    """Refuse a placement of experts over the ranks of an engine that does not fit. Raises UserError."""
    if moe_ep == 1 and model.moe is None:
        return
    if model.moe is None:
        raise UserError(f"rollout.moe_ep is {moe_ep}, but {model.family} has no experts; it must be 1")
    experts, f = model.moe.num_experts, model.moe.intermediate_size
    fits = [n for n in range(1, tp + 1) if tp % n == 0 and experts % n == 0 and f % (tp // n) == 0]
    if moe_ep not in fits:
        raise UserError(f"rollout.moe_ep is {moe_ep}; it must divide rollout.tp {tp} and the {experts} experts of the model, and "
                        f"tp / moe_ep their intermediate size {f}: " + (f"choose {' or '.join(map(str, fits))}" if fits else "no size does with this tp"))


def check_fp8_blocks(model: ModelConfig, tp: int, moe_ep: int) -> None:
    """Refuse an engine whose cuts are off the blocks of FP8 scales, by a layer of each kind. Raises UserError."""
    party = _in_fp8(trtllm_party(model, (tuple(range(tp)),), torch.bfloat16, moe_ep), model)
    for layer in {0, *sorted(model.moe_layers)[:1]}:
        party.shards(1 + layer)  # the block of the embedding comes first


def _in_fp8(engines: Party, model: ModelConfig) -> Party:
    return fp8_party(engines, fp8_weights(model), len(canonical_blocks(model)))


class Rollout:
    """World_size / tp engines, each over tp consecutive ranks. All ranks call `generate` and `sync` together.

    `moe_ep`: the ranks of an engine over which whole experts are dealt. `fp8`: matrices are FP8 codes in blocks, quantised by the sync.
    `driver`: TensorRT-LLM generates, with its sampler chosen by the run's `temperature`. `options` are further ones of EmbeddedEngine.
    """

    engine: EmbeddedEngine | TensorRTEngine

    def __init__(self, model: ModelConfig, dtype: torch.dtype, tp: int, max_batch_size: int, device: Device, exchange: Exchange,
                 rank: int, world_size: int, driver: DriverOptions | None = None, temperature: float = 1.0, moe_ep: int = 1, fp8: bool = False,
                 **options: Any) -> None:
        check_engine_size(tp, world_size, model, driver, device, moe_ep, fp8)
        prepare_dtype(dtype, device)
        self.model, self.dtype, self.tp, self.exchange = model, dtype, tp, exchange
        self.rank, self.world_size, self.moe_ep, self.fp8 = rank, world_size, moe_ep, fp8
        self.replica, self.replicas = rank // tp, world_size // tp
        group = None
        if tp > 1:  # every rank takes part in creating every group
            backend = device.backend if driver is None else "gloo"  # the driver's ranks exchange host objects
            groups = [dist.new_group(list(range(i * tp, (i + 1) * tp)), backend=backend) for i in range(self.replicas)]
            group = groups[self.replica]
        if driver is None:
            self.engine = EmbeddedEngine(model, dtype, group, tp, rank % tp, rank, max_batch_size, device=device.torch, moe_ep=moe_ep, fp8=fp8,
                                         **options)
        else:
            ranks = tuple(range(self.replica * tp, (self.replica + 1) * tp))
            self.engine = make_engine(model, dtype, ranks, rank % tp, self.replica, group, device.torch, driver, max_batch_size, temperature, moe_ep)
        self._sync: WeightSync | None = None
        self._work: dict[str, float] = {}

    def sync(self, source: TrainingModel, version: int) -> SyncReport:
        """Bring every engine to the trainer's weights, as `version`, on all ranks or on none."""
        if self._sync is None:
            trainer = mcore_party(self.model, source.parallel, self.world_size, source.dtype, source.names)
            self._sync = self._quantising(trainer) if self.fp8 else WeightSync(trainer, self._destination(), canonical_blocks(self.model), self.rank)
        return self._sync.run(source.tensors, self.engine, version)

    def _destination(self) -> Party | list[Layout]:
        """What all engines hold. The embedded one's ranks are in tp order; TensorRT-LLM's workers may sit on their GPUs in another."""
        orders: list[tuple[int, ...] | None] = [tuple(range(i * self.tp, (i + 1) * self.tp)) for i in range(self.replicas)]
        if isinstance(self.engine, TensorRTEngine):
            orders = self.exchange.gather(self.engine.order)
        if None in orders:
            return self.exchange.gather(self.engine.layouts[self.rank % self.tp])
        return trtllm_party(self.model, tuple(dict.fromkeys(order for order in orders if order)), self.dtype, self.moe_ep)

    def _quantising(self, trainer: Party) -> WeightSync:
        """A sync that makes the FP8 codes and scales at the trainer, so that they are what travels."""
        blocks, weights, engines = canonical_blocks(self.model), fp8_weights(self.model), self._destination()
        assert not isinstance(engines, list)  # fp8 is the embedded engine's
        source = scaled_party(trainer, weights, len(blocks))
        return WeightSync(source, _in_fp8(engines, self.model), fp8_blocks(blocks, weights), self.rank,
                          transform=Fp8Source(source, self.rank))

    def generate(self, requests: Sequence[Request], report: Callable[[Completion], None] | None = None) -> list[Completion]:
        """Completions of all requests on every rank, ordered by request and sample. Requests are dealt over the engines.

        `report` is called with each sample that this rank's engine finishes, when it does.
        """
        share = requests[self.replica::self.replicas]
        before = self.engine.stats()
        mine = self.engine.generate(share) if report is None else self._reported(share, report)
        leader = self.rank % self.tp == 0
        self._work = _work(share, before, self.engine.stats()) if leader else {}
        parts = self.exchange.gather(mine if leader else [])
        return sorted((c for part in parts for c in part), key=lambda c: (c.request_id, c.sample))

    def metrics(self) -> dict[str, float]:
        """What the last `generate` asked of all engines, as `engine/*` metrics; a collective. {} where the engine does not count it."""
        works = [work for work in self.exchange.gather(self._work) if work.get("steps")]
        if not works:
            return {}
        total = {key: sum(work[key] for work in works) for key in works[0]}
        return {"engine/batch_size_mean": total["batch_samples"] / total["steps"],
                "engine/prefix_hit_rate": 1 - total["prefill_tokens"] / max(1, total["prompt_tokens"]),
                "engine/kv_use_max": max(work["kv_use"] for work in works), "engine/preemptions": total["preemptions"],
                "engine/queued_seconds": total["queued"] / max(1, total["completions"]),
                "engine/longest_sample_seconds": max(work["longest"] for work in works)}

    def _reported(self, requests: Sequence[Request], report: Callable[[Completion], None]) -> list[Completion]:
        self.engine.submit(requests)
        done = []
        for completion in self.engine.stream():
            done.append(completion)
            report(completion)
        return done


def _work(requests: Sequence[Request], before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What an engine counted between two readings of its stats, while it answered `requests`; {} where it does not count so much."""
    if "batch_samples" not in after:
        return {}
    out = {key: after[key] - before[key] for key in ("steps", "batch_samples", "prefill_tokens", "completions", "preemptions")}
    out["queued"] = after["mean_queued_seconds"] * after["completions"] - before["mean_queued_seconds"] * before["completions"]
    return {**out, "prompt_tokens": sum(len(r.prompt_ids) * r.samples for r in requests), "longest": after["longest_seconds"],
            "kv_use": after["kv_blocks_most"] / after["kv_blocks_total"]}
