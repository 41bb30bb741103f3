"""A run: this rank's environment, the roles and the state that outlives the process."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkpoint.hf import read_hf
from checkpoint.lease import Lease, acquire
from checkpoint.value_head import read_value_model
from mcore_rl.config import Config
from mcore_rl.config.roles import ActorConfig, CriticConfig
from mcore_rl.config.roles import OptimizerConfig as OptimizerSection
from mcore_rl.data import PromptStream, Row
from mcore_rl.exchange import Exchange
from mcore_rl.policy import Policy
from mcore_rl.rollout import Rollout
from parallel.config import ParallelConfig
from parallel.device import Device, prepare_megatron, select_device
from parallel.environment import Environment, exit_with_launcher, read_environment, start
from parallel.errors import UserError
from parallel.model import torch_dtype
from parallel.model_config import ModelConfig
from parallel.options import TrainingOptions
from parallel.packing import Batching
from parallel.parameter_rules import frozen_in_some_layers
from parallel.training import OptimizerConfig, TrainingModel, build
from resharding.layouts import mcore_layout
from trtllm_rollout.protocol import SamplingParams

logger = logging.getLogger(__name__)


@dataclass
class World:
    """This process among the others."""

    environment: Environment
    device: Device
    exchange: Exchange

    @property
    def rank(self) -> int:
        return self.environment.rank

    @property
    def size(self) -> int:
        return self.environment.world_size


@contextlib.contextmanager
def joined(device: str = "auto", threads: int | None = None) -> Iterator[World]:
    """Read the launcher's environment, join the world and leave it at the end. Raises UserError for a bad environment."""
    environment = read_environment()
    chosen = select_device(device, environment.local_rank)
    torch.set_num_threads(threads or max(1, (os.cpu_count() or 1) // environment.local_world_size))
    exit_with_launcher(environment)
    prepare_megatron(chosen)
    if dist.is_initialized():
        yield World(environment, chosen, Exchange())
        return
    start(environment, chosen.backend)
    try:
        yield World(environment, chosen, Exchange())
    finally:
        dist.destroy_process_group()


@dataclass
class Run:
    """What the phases work with. Roles that a run does not need are None."""

    config: Config
    world: World
    model: ModelConfig
    tokenizer: Any
    rows: list[Row]
    prompts: PromptStream
    directory: Path
    actor: Any = None
    critic: Any = None
    lease: Lease | None = None
    reference: Any = None
    rollout: Any = None
    reward: Callable[[str, Row], float] = lambda response, row: 0.0
    on_phase: Callable[[str], None] = lambda name: None
    held_out: list[Row] = field(default_factory=list)
    step: int = 0

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def world_size(self) -> int:
        return self.world.size

    @property
    def device(self) -> Device:
        return self.world.device

    @property
    def exchange(self) -> Exchange:
        return self.world.exchange

    def sampling(self, temperature: float | None = None) -> SamplingParams:
        """Sampling parameters of a training rollout; with `temperature` those of an evaluation (no top-k or top-p)."""
        c = self.config.rollout
        stops = tuple(sorted({*stop_ids(self.model, self.tokenizer), *c.stop_token_ids}))
        if temperature is not None:
            return SamplingParams(temperature=temperature, max_tokens=c.max_tokens, stop_token_ids=stops)
        return SamplingParams(c.temperature, c.top_k, c.top_p, c.max_tokens, stops)


def stop_ids(model: ModelConfig, tokenizer: Any) -> set[int]:
    """Token ids that end a response: the model's and the tokenizer's end-of-sequence ids."""
    own = getattr(tokenizer, "eos_token_id", None)
    return {*model.eos_token_ids, *([own] if own is not None else [])}


def refuse_value_model(model: ModelConfig, role: str, path: str | None) -> None:
    """Raises UserError where a model that must predict tokens has a value head."""
    if model.head == "value":
        raise UserError(f"the {role}'s model {path!r} is a value model ({model.hf.get('architectures')}), which predicts no tokens; give a causal "
                        "language model here, and this directory as critic.path")


def make_policy(world: World, model: ModelConfig, parallel: ParallelConfig, dtype: str, seed: int, weights: str | None,
                optimizer: OptimizerConfig | None = None, layer_implementation: str = "auto", role: str = "actor",
                batching: Batching = Batching(), options: TrainingOptions = TrainingOptions()) -> Policy:
    """Build a role's model on all ranks and read its weights from a Hugging Face directory."""
    if role != "critic":
        refuse_value_model(model, role, weights)
    parallel.validate(world.size, model, role)
    options.validate(model, batching.packing, role)
    training = build(model, parallel, dtype, world.device, world.rank, world.size, seed, optimizer, layer_implementation, options)
    if weights is not None:
        load_weights(training, weights, world)
    return Policy(training, world.exchange, world.size, batching)


def make_critic(world: World, config: Config, model: ModelConfig, holds_head: bool, path: str) -> Policy:
    """Build the value model on all ranks, in its own layout, from a Hugging Face directory: see `checkpoint.value_head`. Raises UserError."""
    c = config.critic
    if holds_head and c.head_std:
        raise UserError(f"critic.head_std is {c.head_std:g}, but {path!r} holds a value head, which is used; remove the key")
    critic = make_policy(world, model, c.parallel, config.model.dtype, config.run.seed, None,
                         optimizer_options(config, c.optimizer, config.run.steps * c.updates_per_step), config.actor.layer_implementation, "critic",
                         batching_options(c))
    read_value_model(path, critic.training, world.rank, world.size, holds_head, config.run.seed, c.head_std)
    return critic


def batching_options(role: ActorConfig | CriticConfig) -> Batching:
    """How sequences become micro-batches, of the actor (and of the reference) or of the critic."""
    return Batching(role.packing, role.max_tokens_per_micro_batch)


def optimizer_options(config: Config, optimizer: OptimizerSection | None = None, updates: int | None = None) -> OptimizerConfig:
    """A role's optimizer (None: the actor's); a decay without an end of its own ends with the run, after `updates` steps."""
    values = asdict(optimizer or config.actor.optimizer) | {"freeze": () if optimizer else config.actor.freeze}
    if values["schedule"] != "constant":
        values["decay_steps"] = values["decay_steps"] or updates or config.total_updates
    if config.run.only is not None:  # no step is taken: a warm-up longer than the run is no fault
        values["warmup_steps"] = 0
    return OptimizerConfig(**values)


def check_frozen(config: Config, model: ModelConfig) -> None:
    """Refuse frozen layers in a run that writes checkpoints. Raises UserError."""
    name = frozen_in_some_layers(model, config.actor.freeze)
    if config.checkpoint.every and name is not None:
        raise UserError(f"actor.freeze matches {name} and not the same parameter of other layers, and checkpoint.every is {config.checkpoint.every}: "
                        "Megatron-Core's checkpoints stack the optimizer over layers and cannot leave some out; freeze it in all layers, or set checkpoint.every=0")
    if config.checkpoint.every and config.actor.freeze and config.actor.parallel.pp > 1 and not config.actor.optimizer.distributed:
        raise UserError("actor.freeze with actor.optimizer.distributed false, actor.parallel.pp above 1 and checkpoint.every above 0: stages that train "
                        "different numbers of parameters cannot read such a checkpoint; set actor.optimizer.distributed=true")


def training_options(config: Config) -> TrainingOptions:
    """What the actor's backward pass computes again, how it balances experts, and its FP8 recipe."""
    return TrainingOptions(config.actor.recompute, config.actor.recompute_modules, config.actor.moe, config.actor.fp8)


def load_weights(training: TrainingModel, directory: str | Path, world: World) -> None:
    """Fill a model from a Hugging Face directory; each rank reads only what it holds."""
    layout = mcore_layout(training.model, training.parallel, world.rank, world.size, training.dtype, training.names)
    read_hf(directory, layout, training.tensors, training.model)
    training.reload_main_params()


def make_rollout(world: World, model: ModelConfig, config: Config) -> Rollout:
    """The engines of a run, without weights yet."""
    dtype = torch_dtype(config.rollout.dtype or config.model.dtype)
    options = {} if config.rollout.driver is not None else {"fp8_rows": config.fp8_rows, "report_experts": config.actor.moe.replay_experts}
    return Rollout(model, dtype, config.rollout.tp, config.rollout.max_batch_size, world.device, world.exchange, world.rank, world.size,
                   driver=config.rollout.driver, temperature=config.rollout.temperature, moe_ep=config.rollout.moe_ep, fp8=config.rollout.fp8, **options)


def take_directory(config: Config) -> tuple[Path, Lease]:
    """Own the run directory (all ranks), waiting for an older owner as long as the config says."""
    directory = Path(config.run.dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run.dir {config.run.dir!r} cannot be made ({error.strerror}); choose another directory") from None
    return directory, acquire(directory, config.run.lease_wait_s)
