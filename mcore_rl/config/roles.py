"""The sections of the roles that are models: how each is laid out, optimised and batched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mcore_rl.config.fields import check_ranges, option
from parallel.config import ParallelConfig
from parallel.errors import UserError
from parallel.options import MoEOptions, Recompute, RecomputeModule
from parallel.parameter_rules import NO_WEIGHT_DECAY


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule (Loshchilov and Hutter, arXiv:1711.05101)."""

    lr: float = option("learning rate (its highest value)", 1e-6, above=0, below=1)
    min_lr: float = option("lowest learning rate of a decaying schedule", 0.0, low=0, below=1)
    beta1: float = option("decay of the first moment", 0.9, low=0, below=1)
    beta2: float = option("decay of the second moment", 0.95, low=0, below=1)
    eps: float = option("added to the root of the second moment", 1e-8, above=0)
    weight_decay: float = option("decoupled weight decay", 0.0, low=0, below=1)
    clip_grad: float = option("largest global gradient norm; 0: no clipping", 1.0, low=0)
    warmup_steps: int = option("optimizer steps over which the learning rate rises linearly to lr", 0, low=0)
    schedule: Literal["constant", "linear", "cosine"] = option("what the learning rate does after warm-up", "constant")
    decay_steps: int | None = option("optimizer step at which min_lr is reached; null: the last one of the run", None, low=1)
    distributed: bool = option("cut optimizer state over data-parallel ranks (Megatron-Core's distributed optimizer)", True)
    no_weight_decay: tuple[str, ...] = option("parameters without weight decay, as patterns on Hugging Face names (Megatron's rule: vectors)",
                                              NO_WEIGHT_DECAY)
    overlap_grad_reduce: bool = option("reduce gradients over data-parallel ranks while the backward pass still computes; wants distributed: false", False)
    bucket_size: int | None = option("parameters reduced at a time under overlap_grad_reduce; null: Megatron-Core's size (40 million or more)", None, low=1)

    def __post_init__(self) -> None:
        check_ranges(self, "optimizer")
        if self.bucket_size is not None and not self.overlap_grad_reduce:
            raise UserError(f"optimizer.bucket_size is {self.bucket_size}, but optimizer.overlap_grad_reduce is false, and all gradients are reduced at once; "
                            "set it to true or remove the key")
        if self.overlap_grad_reduce and self.distributed:
            raise UserError("optimizer.overlap_grad_reduce is true with optimizer.distributed: Megatron-Core 0.16 pads each bucket, and its checkpoints of "
                            "several padded buckets lose optimizer state; set optimizer.distributed=false or optimizer.overlap_grad_reduce=false")


@dataclass(frozen=True)
class ActorConfig:
    """The policy: its parallel layout, optimizer and batching."""

    parallel: ParallelConfig = option("parallel sizes of the actor", section=ParallelConfig)
    optimizer: OptimizerConfig = option("optimizer of the actor", section=OptimizerConfig)
    micro_batch_size: int = option("sequences in one forward/backward pass of a rank", 8, low=1)
    log_prob_micro_batch_size: int = option("sequences in one forward pass for log-probs", 16, low=1)
    packing: Literal["packed", "padded", "shared_prompt"] = option(
        "packed: sequences of a micro-batch stand in one row, without padding; padded: one row each; shared_prompt: packed, and the prompt of "
        "a group is computed once for all its responses (layer_implementation torch)", "packed")
    max_tokens_per_micro_batch: int | None = option("fill micro-batches up to this many tokens, padding included, instead of a number of sequences; "
                                                    "under cp whole sequences count; null: micro_batch_size and log_prob_micro_batch_size hold", None, low=1)
    updates_per_step: int = option("optimizer updates (mini-batches) made from the samples of one step", 1, low=1)
    skip_old_log_probs: bool = option("take old log-probs from the update's own forward instead of a pass of their own "
                                      "(allowed with one update per step, where the two are equal)", False)
    offload: Literal["none", "optimizer", "all"] = option(
        "what the actor gives up while the engine generates, and the engine while the actor trains. optimizer: its state, fp32 main parameters and "
        "gradients; all: weights too, and the reference's; a critic does as the actor. To pinned host memory from a GPU, to a "
        "file in run.dir from a CPU", "none")
    freeze: tuple[str, ...] = option("parameters that are not trained, as patterns on Hugging Face names, such as \"*.embed_tokens.*\"", ())
    recompute: Recompute = option("activations that the backward pass computes again instead of keeping. full: all of a layer; selective: "
                                  "recompute_modules", "none")
    recompute_modules: tuple[RecomputeModule, ...] = option("parts of a layer that recompute: selective computes again", ("core_attn",))
    moe: MoEOptions = option("the load of experts", section=MoEOptions)
    layer_implementation: Literal["auto", "torch", "te"] = option("te: Transformer Engine; auto: te where it imports on a GPU", "auto")
    fp8: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] | None = option(
        "train with FP8 products: a recipe of Transformer Engine (layer_implementation te); with torch layers blockwise only, emulated "
        "by rounding (docs/context-parallel-and-fp8.md)", None)

    def __post_init__(self) -> None:
        check_ranges(self, "actor")


@dataclass(frozen=True)
class CriticConfig:
    """The value model of PPO: its parallel layout, optimizer and batching; its layers are Transformer Engine's where the actor's are."""

    path: str | None = option("Hugging Face directory to start from: a causal language model (its layers, under a new head) or a reward model "
                              "(*ForSequenceClassification with one label: head and layers); null: model.path", None)
    head_std: float = option("standard deviation of a new head, drawn from run.seed; 0: zeros, so that all values are 0 at first", 0.0, low=0)
    parallel: ParallelConfig = option("parallel sizes of the critic", section=ParallelConfig)
    optimizer: OptimizerConfig = option("optimizer of the critic", section=OptimizerConfig)
    micro_batch_size: int = option("sequences in one forward/backward pass of a rank", 8, low=1)
    value_micro_batch_size: int = option("sequences in one forward pass for values", 16, low=1)
    packing: Literal["packed", "padded", "shared_prompt"] = option("as actor.packing", "packed")
    max_tokens_per_micro_batch: int | None = option("as actor.max_tokens_per_micro_batch; null: micro_batch_size and value_micro_batch_size hold",
                                                    None, low=1)
    updates_per_step: int = option("optimizer updates (mini-batches) made from the samples of one step", 1, low=1)
    value_clip: float | None = option("an update moves a value no further than this from the one that the step started with; null: no limit", 0.2,
                                      above=0)
    warmup_steps: int = option("first steps of the run that update the critic only", 0, low=0)

    def __post_init__(self) -> None:
        check_ranges(self, "critic")


@dataclass(frozen=True)
class ReferenceConfig:
    """The frozen model of the KL penalty; used where algorithm.kl_coefficient > 0."""

    parallel: ParallelConfig | None = option("parallel sizes of the reference; null: as the actor", None)
    path: str | None = option("Hugging Face model directory; null: model.path", None)
