"""The sections of a configuration file: one frozen dataclass each, a help line and a range per field.

Paths are relative to the working directory. Rules between sections are in `rules.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mcore_rl.config.fields import check_ranges, option
from trtllm_rollout.driver.options import DriverOptions


@dataclass(frozen=True)
class RunConfig:
    """The run directory, its length and how ranks start."""

    dir: str = option("run directory: config.yaml, metrics.jsonl, samples/, checkpoints/, plots/ are written here")
    seed: int = option("seed of everything random: data order, sampling, initial weights", 1234, low=0)
    steps: int = option("number of steps to train (a resumed run counts from its first start)", 100, low=1)
    only: Literal["rollout"] | None = option("rollout: generate and store samples, train nothing (input of rollout.replay)", None)
    threads: int | None = option("CPU threads per rank; null: cores / local ranks. Results are bit-identical only at one thread count",
                                 None, low=1)
    device: Literal["auto", "cpu", "cuda"] = option("where tensors live; auto: cuda where there is one", "auto")
    resume: Literal["auto", "never"] = option("auto: continue from the newest checkpoint in dir; never: refuse a dir that holds one",
                                              "auto")
    lease_wait_s: float = option("seconds to wait for another run that owns dir before giving up", 30.0, low=0)
    strict: bool = option("stop with an explanation when an on-policy gate breaks (algorithm.*_max); false: warn", True)

    def __post_init__(self) -> None:
        check_ranges(self, "run")


@dataclass(frozen=True)
class InitConfig:
    """Sizes of a model made from scratch, written to model.path where that is missing."""

    family: Literal["llama", "qwen2", "qwen3_moe"] = option("architecture (qwen3_moe: with experts in every layer)", "llama")
    hidden_size: int = option("width of the residual stream", 128, low=1)
    intermediate_size: int = option("width of the feed-forward layer", 384, low=1)
    num_experts: int = option("experts of a layer (for qwen3_moe)", 8, low=2)
    experts_per_token: int = option("experts that a token goes to (for qwen3_moe)", 2, low=1)
    moe_intermediate_size: int = option("width of an expert (for qwen3_moe)", 128, low=1)
    num_layers: int = option("number of layers", 4, low=1)
    num_heads: int = option("attention heads", 4, low=1)
    num_kv_heads: int = option("key/value heads", 2, low=1)
    head_dim: int | None = option("size of one head; null: hidden_size / num_heads", None, low=1)
    max_position_embeddings: int = option("longest sequence in tokens", 256, low=1)
    rope_theta: float = option("base of the rotary frequencies", 10000.0, above=0)
    tied: bool = option("one matrix for input embeddings and output head", True)
    init_std: float = option("standard deviation of the initial weights", 0.02, above=0)
    characters: str = option("alphabet of the character-level tokenizer that is written beside the model",
                             "0123456789+-*/=()?:., abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ\n")

    def __post_init__(self) -> None:
        check_ranges(self, "model.init")


@dataclass(frozen=True)
class ModelSection:
    """The model that is trained."""

    path: str = option("Hugging Face model directory (config.json, *.safetensors, tokenizer)")
    dtype: Literal["float32", "bfloat16"] = option("type of weights and computation; the optimizer keeps float32", "bfloat16")
    make_vocab_size_divisible_by: int = option("Megatron-Core pads the vocabulary to a multiple of this x tp", 128, low=1)
    init: InitConfig | None = option("make a small model from scratch at path where it is missing", None)

    def __post_init__(self) -> None:
        check_ranges(self, "model")


@dataclass(frozen=True)
class RolloutConfig:
    """Generation."""

    engine: Literal["embedded", "tensorrt_llm"] = option("engine that generates (tensorrt_llm: docs/tensorrt-llm.md)", "embedded")
    tp: int = option("tensor-parallel size of the engine; further ranks hold further engines", 1, low=1)
    moe_ep: int = option("ranks of an engine over which whole experts are dealt (over the other tp / moe_ep each is cut); 1: all are cut", 1, low=1)
    prompts_per_step: int = option("prompts of one step, over all engines", 8, low=1)
    samples_per_prompt: int = option("samples (one group) per prompt", 8, low=1)
    temperature: float = option("sampling temperature; 0 is greedy and only for run.only=rollout", 1.0, low=0)
    top_k: int = option("sample among the k most likely tokens; 0: all", 0, low=0)
    top_p: float = option("sample among the most likely tokens that hold this much probability", 1.0, above=0, high=1)
    max_tokens: int = option("longest response in tokens; a longer one is cut (finish reason length)", 256, low=1)
    stop_token_ids: tuple[int, ...] = option("token ids that end a response, beside the model's end-of-sequence ids", ())
    max_batch_size: int = option("most requests an engine decodes at once", 256, low=1)
    replay: str | None = option("train from the samples stored in this directory instead of generating", None)
    dtype: Literal["float32", "bfloat16"] | None = option("type of the engine's weights; null: model.dtype", None)
    fp8: bool = option("hold the engine's matrices as FP8 with a scale for every 128 x 128 block, made by every sync (rollouts are off-policy "
                       "by that rounding)", False)
    fp8_rows: bool | None = option("round the rows that are multiplied with FP8 matrices too, with a scale for every 128 elements, as TensorRT-LLM and "
                                   "actor.fp8 blockwise do; null: where actor.fp8 is blockwise", None)
    tensorrt_llm: DriverOptions = option("the TensorRT-LLM driver", section=DriverOptions)

    def __post_init__(self) -> None:
        check_ranges(self, "rollout")

    @property
    def driver(self) -> DriverOptions | None:
        """Options of the TensorRT-LLM driver, where that is the engine."""
        return self.tensorrt_llm if self.engine == "tensorrt_llm" else None


@dataclass(frozen=True)
class AlgorithmConfig:
    """Advantages and loss: GRPO (Shao et al., arXiv:2402.03300) or PPO (Schulman et al., arXiv:1707.06347)."""

    name: Literal["grpo", "ppo"] = option("grpo: rewards compared within a prompt's samples; ppo: a critic's values and advantages by GAE", "grpo")
    gamma: float = option("discount of later rewards, per token of the policy (ppo)", 1.0, low=0, high=1)
    lam: float = option("GAE's lambda: 1 looks at the whole rest of the sample, 0 at the next value (ppo; arXiv:1506.02438)", 0.95, low=0, high=1)
    clip_ratio_low: float = option("the ratio is clipped below 1 - this", 0.2, low=0, high=1)
    clip_ratio_high: float = option("the ratio is clipped above 1 + this (DAPO's clip-higher: 0.28)", 0.2, low=0)
    advantage_normalisation: Literal["std", "none"] = option("grpo: divide centred rewards by the group's sample standard deviation, or not "
                                                             "(none: Dr. GRPO); ppo: whiten advantages over all tokens of the step, or not", "std")
    advantage_eps: float = option("added to the standard deviation", 1e-6, low=0)
    loss_aggregation: Literal["token-mean", "sequence-mean", "fixed-length"] = option(
        "token-mean: mean over all tokens of the step; sequence-mean: mean over samples of each sample's mean; "
        "fixed-length: sum over tokens / (samples x rollout.max_tokens) (Dr. GRPO)", "token-mean")
    kl_coefficient: float = option("weight of the KL penalty towards the reference; 0: no reference is loaded", 0.0, low=0)
    kl_in: Literal["loss", "reward"] = option("where that penalty is: in the actor's loss, or taken from the reward of every token (ppo)", "loss")
    kl_estimator: Literal["k1", "k2", "k3"] = option("estimator of that KL (Schulman, joschu.net/blog/kl-approx.html)", "k3")
    entropy_coefficient: float = option("weight of the entropy bonus in the loss", 0.0, low=0)
    mask_truncated: bool = option("leave samples cut at max_tokens out of the loss and its counts "
                                  "(they still count in their group's mean reward)", False)
    log_prob_gap_max: float | Literal["auto"] | None = option(
        "on-policy gate: largest |trainer - engine| log-prob of a token right after a sync; auto: 1e-3 where actor and engine "
        "compute in float32, no gate in bfloat16 or with FP8 (rounding differs; the metric is still reported); null: no gate", "auto", above=0)
    ratio_deviation_max: float | Literal["auto"] | None = option(
        "on-policy gate: largest |ratio - 1| at the first update of a step; auto: 1e-4 in float32, no gate in bfloat16 or with actor.fp8; null: no gate",
        "auto", above=0)

    def __post_init__(self) -> None:
        check_ranges(self, "algorithm")


@dataclass(frozen=True)
class DataConfig:
    """Prompts (and, for sft, responses)."""

    train: str = option("JSONL or parquet file, or a directory of them")
    prompt_field: str = option("field of the prompt: text, or a list of chat messages with role and content", "prompt")
    answer_field: str | None = option("field of the right answer, for the reward; null: rows have none", "answer")
    response_field: str = option("field of the response to learn (only for sft)", "response")
    prompt_format: Literal["text", "chat"] = option("text: the prompt as it stands; chat: through the tokenizer's chat template", "text")
    system_prompt: str | None = option("system message put before every chat prompt that has none (only for prompt_format chat)", None)
    max_prompt_tokens: int = option("longest prompt in tokens", 1024, low=1)
    overlong: Literal["drop", "error"] = option("longer prompts: dropped and counted, or refused", "drop")
    bad_rows: Literal["error", "drop"] = option("rows without a usable prompt or answer: refused with a list, or dropped and counted",
                                                "error")
    shuffle: bool = option("new order in every epoch, from run.seed; false: file order", True)

    def __post_init__(self) -> None:
        check_ranges(self, "data")


@dataclass(frozen=True)
class RewardConfig:
    """What a response is worth."""

    name: Literal["exact_match", "gsm8k", "function"] = option(
        "exact_match: 1 where response and answer are equal without surrounding white space; gsm8k: 1 where the number after the last "
        "#### equals the answer's; function: your own", "exact_match")
    function: str | None = option("package.module:function, called as function(response, row) -> number (only for name function)", None)


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out prompts, reported as eval/*."""

    data: str | None = option("file or directory of held-out rows, fields as in data; null: no evaluation", None)
    every: int = option("evaluate before step 1 and after every N steps; 0: only on demand (mcore-rl evaluate)", 0, low=0)
    greedy: bool = option("pass rate of one greedy response per prompt", True)
    samples: int = option("k sampled responses per prompt, reported as avg@k and pass@k; 0: none", 0, low=0)
    temperature: float = option("temperature of those samples", 1.0, above=0)
    max_prompts: int | None = option("use only the first N rows; null: all", None, low=1)

    def __post_init__(self) -> None:
        check_ranges(self, "evaluation")


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints in run.dir/checkpoints."""

    every: int = option("write one after every N steps and after the last; 0: none", 0, low=0)
    keep: int | None = option("newest checkpoints that are kept; null: all", 2, low=1)

    def __post_init__(self) -> None:
        check_ranges(self, "checkpoint")


@dataclass(frozen=True)
class LogConfig:
    """What is shown and written beside metrics.jsonl."""

    level: Literal["info", "debug"] = option("debug: each phase with the columns, shapes and ranks it touched", "info")
    samples_per_step: int = option("most samples written to samples/ per step; 0: none", 32, low=0)
    tensorboard: bool = option("write TensorBoard events", True)
    wandb: bool = option("send metrics to Weights & Biases (needs the package wandb)", False)
    plots: bool = option("draw plots/*.png at the end and at every checkpoint", True)

    def __post_init__(self) -> None:
        check_ranges(self, "log")


@dataclass(frozen=True)
class SftConfig:
    """Supervised fine-tuning (mcore-rl sft)."""

    output: str = option("Hugging Face model directory to write at the end")
    steps: int = option("optimizer steps", 100, low=1)
    batch_size: int = option("sequences of one optimizer step, over all ranks", 32, low=1)
    max_sequence_tokens: int | None = option("longest prompt + response in tokens, treated as data.overlong says; null: no limit",
                                             None, low=1)

    def __post_init__(self) -> None:
        check_ranges(self, "sft")


@dataclass(frozen=True)
class WarmUpConfig:
    """A supervised run that makes the model first."""

    config: str = option("configuration of the mcore-rl sft run that is made first where model.path is missing")
