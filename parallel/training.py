"""One role's model in training: Megatron's DDP, optimizer, schedule and one forward/backward over micro-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from parallel import balancing
from parallel.config import Coordinates, ParallelConfig
from parallel.context_parallel import cut, held_columns, sequence_lengths
from parallel.device import Device, prepare_dtype
from parallel.fp8_recipe import check_fp8, fill_up
from parallel.groups import RoleGroups, role_groups
from parallel.log_probs import head_log_probs
from parallel.micro_batch import MicroBatch
from parallel.model import build_modules, choose_layer_implementation, named_tensors, torch_dtype, transformer_config
from parallel.model_config import ModelConfig
from parallel.offload import Offload
from parallel.options import TrainingOptions
from parallel.parameter_rules import NO_WEIGHT_DECAY, check_patterns, freeze, overrides
from parallel.silent_faults import refuse_config, refuse_modules, refuse_optimizer, refuse_ragged

# (micro-batch, log-probs, entropy), of a value model (micro-batch, values) -> (loss to differentiate, outputs); predictions are
# [sum of (length - 1)] over the micro-batch's sequences (`MicroBatch.split`), 0 where nothing was predicted
LossFunction = Callable[..., tuple[Tensor, dict[str, Any]]]


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, clipping by global norm (0: none) and the learning-rate schedule, which counts optimizer steps.

    `schedule` is constant, linear or cosine: from `lr` after `warmup_steps` down to `min_lr` at `decay_steps`. `distributed`
    cuts the optimizer state over data-parallel ranks. Parameters whose canonical names match `no_weight_decay` do not decay; those that
    match `freeze` are not trained. `overlap_grad_reduce` reduces gradients over data-parallel ranks while the last backward pass still
    computes, in buckets of `bucket_size` parameters (None: Megatron's size). Megatron's overlapped gathering of parameters is not offered:
    the sync to the engines reads them right after the update.
    """

    lr: float = 1e-6
    min_lr: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    warmup_steps: int = 0
    schedule: str = "constant"
    decay_steps: int | None = None
    distributed: bool = True
    no_weight_decay: tuple[str, ...] = NO_WEIGHT_DECAY
    freeze: tuple[str, ...] = ()
    overlap_grad_reduce: bool = False
    bucket_size: int | None = None


@dataclass(eq=False)
class TrainingModel:
    """A role's model on this rank. `modules` are the bare GPTModels, `chunks` what the schedule runs (DDP where trained).

    `memory` gives up what training holds between phases; using what is given up raises RuntimeError.
    """

    model: ModelConfig
    parallel: ParallelConfig
    dtype: torch.dtype
    device: Device
    groups: RoleGroups
    config: Any
    modules: list[Any]
    chunks: list[Any]
    at: Coordinates
    implementation: str = "torch"
    optimizer: Any = None
    scheduler: Any = None
    options: TrainingOptions = TrainingOptions()

    def __post_init__(self) -> None:
        self.memory = Offload(self)
        self.load: dict[int, balancing.LayerLoad] = {}  # of the last update: see `parallel.balancing.settle`

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, Megatron-Core's parallel state is this role's."""
        with self.groups.entered():
            yield

    @property
    def tensors(self) -> dict[str, Tensor]:
        """This rank's weights by mcore layout name; writing into them needs `reload_main_params` afterwards."""
        self.memory.require("parameters")
        return named_tensors(self.modules)

    @property
    def names(self) -> Literal["local", "te"]:
        """Which parameter names the modules carry: Transformer Engine's spec fuses norms into the linears that follow."""
        return "te" if any(".layer_norm_weight" in name for name in self.tensors) else "local"

    @property
    def is_output_rank(self) -> bool:
        """Whether this rank reports results: the last pipeline stage's first tensor-parallel rank."""
        return self.at.pp == self.parallel.pp - 1 and self.at.tp == 0 and self.at.cp == 0

    def reload_main_params(self) -> None:
        """Copy parameters into the optimizer's fp32 main parameters, after weights were loaded."""
        if self.optimizer is not None:
            self.memory.require("optimizer", "parameters")
            with self.entered():
                self.optimizer.reload_model_params()

    def forward_backward(self, micro_batches: list[MicroBatch], loss_function: LossFunction, temperature: float = 1.0,
                         forward_only: bool = False, update_sequences: int | None = None) -> list[dict[str, Any]]:
        """Run the schedule; returns the loss function's outputs of every micro-batch (on the last stage, else empty).

        The gradient is the sum over micro-batches and data-parallel ranks of the gradients of the returned losses:
        weights that come from global counts make it independent of the split. `update_sequences` are the sequences of all ranks in this
        update, by which auxiliary losses of experts are divided.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.memory.require("parameters", *(() if forward_only else ("gradients",)))
        with self.entered(), torch.set_grad_enabled(not forward_only):
            for module in self.modules:
                module.train(not forward_only)
            if not forward_only:
                for chunk in self.chunks:
                    chunk.zero_grad_buffer()
                self.optimizer.zero_grad()
                balancing.forget(self)
                if self.options.moe.loss and update_sequences is None:
                    raise ValueError("an auxiliary loss of experts needs update_sequences")
            if self.options.fp8 is not None and self.implementation == "te":
                micro_batches = [fill_up(m, self.options.fp8, self.parallel) for m in micro_batches]
            refuse_ragged(self.config, micro_batches, len(self.chunks))
            iterators = [iter(micro_batches) for _ in self.chunks]
            return get_forward_backward_func()(
                forward_step_func=self._forward_step(loss_function, temperature, update_sequences or 1, len(micro_batches)),
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self.chunks if len(self.chunks) > 1 else self.chunks[0], num_microbatches=len(micro_batches),
                seq_length=max(m.tokens.shape[1] for m in micro_batches),
                micro_batch_size=max(m.tokens.shape[0] for m in micro_batches), forward_only=forward_only)

    def _forward_step(self, loss_function: LossFunction, temperature: float, update_sequences: int, count: int) -> Callable[..., Any]:
        from megatron.core import parallel_state

        from parallel.megatron_modules import packed_row

        group, cp_group, cp = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_context_parallel_group(), self.parallel.cp
        micro_batches = count * parallel_state.get_data_parallel_world_size()

        def forward_step(iterator: Iterator[MicroBatch], chunk: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            micro_batch = next(iterator)
            part, whole = cut(micro_batch, cp_group) if cp > 1 else (micro_batch, None)
            row = packed_row(part, self.implementation, cp, self.at.cp)
            if row is not None and self.model.moe is not None:
                routed = balancing.tokens_of(micro_batch, self.options.moe, update_sequences, micro_batches)
                columns = held_columns(sequence_lengths(micro_batch), cp)[self.at.cp] if cp > 1 else None
                row.routed = routed if routed is None or columns is None else routed.of(columns, cp_group)
            output = chunk(part.tokens, part.positions, None, packed_seq_params=row)

            def loss(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
                predictions = self._predict(hidden.flatten(0, 1)[part.rows], part.targets, temperature, group)
                if whole is not None:
                    predictions = whole(torch.stack(predictions, -1)).unbind(-1)
                value, outputs = loss_function(micro_batch, *map(micro_batch.per_token, predictions))
                # the count is Megatron's, for its own division, which `_finalize_gradients` leaves out
                return value, torch.ones((), dtype=torch.int, device=value.device), outputs

            return output, loss

        return forward_step

    def _predict(self, hidden: Tensor, targets: Tensor, temperature: float, group: Any) -> tuple[Tensor, ...]:
        """Log-probs and entropies [predictions] from hidden states [predictions, hidden_size], on the last stage; of a value model its values."""
        from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

        if self.model.head == "value":
            return (hidden.squeeze(-1),)
        module = self.modules[-1]
        weight = module.shared_embedding_or_output_weight() if self.model.tied else module.output_layer.weight
        if not self.parallel.sequence_parallel:
            hidden = copy_to_tensor_model_parallel_region(hidden, group)
        return head_log_probs(hidden, weight, targets, self.model.vocab_size, temperature, group)

    def optimizer_step(self) -> tuple[float, float]:
        """Clip, apply and schedule. Returns (gradient norm before clipping, learning rate used).

        Raises FloatingPointError where the gradient is not finite: nothing is applied.
        """
        self.memory.require("optimizer", "gradients", "parameters")
        with self.entered():
            lr = float(self.optimizer.param_groups[0]["lr"])
            succeeded, grad_norm, _ = self.optimizer.step()
            if not succeeded or grad_norm is None or not torch.isfinite(torch.as_tensor(float(grad_norm))):
                raise FloatingPointError(f"the gradient norm is {grad_norm}: a loss or a weight is not finite")
            self.scheduler.step(increment=1)
            self.load = balancing.settle(self, self.options.moe)
        return float(grad_norm), lr


def build(model: ModelConfig, parallel: ParallelConfig, dtype: str, device: Device, rank: int, world_size: int, seed: int,
          optimizer: OptimizerConfig | None = None, layer_implementation: str = "auto",
          options: TrainingOptions = TrainingOptions()) -> TrainingModel:
    """Build a role's model on every rank (a collective). Without `optimizer` it is frozen: forward passes only.

    Weights are random: load them (`checkpoint.hf.read_hf` into `.tensors`), then `reload_main_params`.
    """
    options.validate(model)
    if optimizer is not None:
        check_patterns(model, optimizer.freeze, optimizer.no_weight_decay)
    prepare_dtype(torch_dtype(dtype), device)
    groups = role_groups(parallel, seed)
    implementation = choose_layer_implementation(layer_implementation, device, model)
    check_fp8(options.fp8, implementation, model, parallel, torch_dtype(dtype), device)
    with groups.entered():
        config = transformer_config(model, parallel, torch_dtype(dtype), implementation, options)
        refuse_config(config)
        modules = build_modules(model, parallel, config, implementation, options.fp8)
        refuse_modules(config, modules, implementation)
        from parallel.megatron_modules import return_hidden_states, watch_rows

        for module in modules:
            module.to(device.torch)
            if module.post_process and model.head == "lm":
                return_hidden_states(module)
            watch_rows(module, model, options.moe)
        built = TrainingModel(model, parallel, torch_dtype(dtype), device, groups, config, modules, list(modules),
                              parallel.coordinates(rank, world_size), implementation, options=options)
        if optimizer is None:
            for module in modules:
                module.requires_grad_(False)
        else:
            _make_trainable(built, optimizer, rank, world_size)
    return built


def _make_trainable(built: TrainingModel, options: OptimizerConfig, rank: int, world_size: int) -> None:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
    from megatron.core.optimizer import get_megatron_optimizer

    bf16 = built.dtype == torch.bfloat16
    if built.device.type == "cpu":
        from parallel.cpu_adaptation import name_cuda_types

        for module in built.modules:
            name_cuda_types(module.parameters())
    freeze(built, options.freeze, rank, world_size)
    without_decay = overrides(built, options.no_weight_decay, rank, world_size)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=options.distributed, grad_reduce_in_fp32=bf16, bucket_size=options.bucket_size,
        overlap_grad_reduce=options.overlap_grad_reduce)
    built.chunks = [DistributedDataParallel(built.config, ddp, module) for module in built.modules]
    if options.overlap_grad_reduce:  # gradients are whole after the last micro-batch
        pauses = [chunk.no_sync for chunk in built.chunks]
        built.config.no_sync_func = pauses if len(pauses) > 1 else pauses[0]
    built.config.finalize_model_grads_func = _finalize_gradients
    built.optimizer = get_megatron_optimizer(MegatronOptimizerConfig(
        optimizer="adam", lr=options.lr, min_lr=options.min_lr, adam_beta1=options.beta1, adam_beta2=options.beta2,
        adam_eps=options.eps, weight_decay=options.weight_decay, clip_grad=options.clip_grad, bf16=bf16,
        params_dtype=built.dtype, use_distributed_optimizer=options.distributed), built.chunks, without_decay)
    refuse_optimizer(built.optimizer)
    built.scheduler = _scheduler(built.optimizer, options)


def _finalize_gradients(chunks: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's reductions over DP, TP and tied embeddings, without its division: our losses carry global weights."""
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads(chunks, None, **kwargs)


def _scheduler(optimizer: Any, o: OptimizerConfig) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=o.lr, min_lr=o.min_lr, lr_warmup_steps=o.warmup_steps,
        lr_decay_steps=o.decay_steps or max(o.warmup_steps + 1, 1 << 40), lr_decay_style=o.schedule,
        start_wd=o.weight_decay, end_wd=o.weight_decay, wd_incr_steps=0, wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=True)
