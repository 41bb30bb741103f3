"""The whole configuration, and the rules between its sections: what contradicts, and what has no effect."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

from mcore_rl.config.fields import option
from mcore_rl.config.roles import ActorConfig, CriticConfig, ReferenceConfig
from mcore_rl.config.sections import (
    AlgorithmConfig,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    LogConfig,
    ModelSection,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SftConfig,
    WarmUpConfig,
)
from mcore_rl.config.yaml_tree import NULL_WORDS
from parallel.errors import UserError
from parallel.packing import SHARED_NEEDS_TORCH

KINDS = ("train", "sft", "evaluate")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A complete, valid configuration of one command (`kind`). Raises UserError where sections contradict each other."""

    kind: str
    run: RunConfig = option("the run directory, its length and how ranks start")
    model: ModelSection = option("the model that is trained")
    actor: ActorConfig = option("the policy: parallel layout, optimizer, batching", section=ActorConfig)
    critic: CriticConfig = option("the value model (algorithm ppo)", section=CriticConfig)
    reference: ReferenceConfig = option("the frozen model of the KL penalty", section=ReferenceConfig)
    rollout: RolloutConfig = option("generation", section=RolloutConfig)
    algorithm: AlgorithmConfig = option("advantages and loss", section=AlgorithmConfig)
    data: DataConfig = option("prompts")
    reward: RewardConfig = option("what a response is worth", section=RewardConfig)
    evaluation: EvaluationConfig = option("held-out prompts", section=EvaluationConfig)
    checkpoint: CheckpointConfig = option("checkpoints", section=CheckpointConfig)
    log: LogConfig = option("what is shown and written", section=LogConfig)
    sft: SftConfig | None = option("supervised fine-tuning (only for mcore-rl sft)", None)
    warm_up: WarmUpConfig | None = option("a supervised run that makes the model first (only for mcore-rl train)", None)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"kind {self.kind!r} of configuration; allowed: {', '.join(KINDS)}")
        problems = [text for broken, text in _contradictions(self) if broken]
        if problems:
            raise UserError("\n".join(problems))

    @property
    def total_updates(self) -> int:
        """The actor's optimizer steps of the whole run."""
        if self.kind == "sft" and self.sft:
            return self.sft.steps
        return max(1, self.run.steps - (self.critic.warmup_steps if self.has_critic else 0)) * self.actor.updates_per_step

    @property
    def has_critic(self) -> bool:
        """Whether the run trains a value model."""
        return self.kind == "train" and self.algorithm.name == "ppo"

    @property
    def offloads(self) -> bool:
        """Whether trainer and engine take turns in holding memory."""
        return self.actor.offload != "none"

    @property
    def log_prob_gap_gate(self) -> float | None:
        """algorithm.log_prob_gap_max with auto resolved; None: no gate."""
        exact = self.model.dtype == "float32" and (self.rollout.dtype or self.model.dtype) == "float32" and not self.rollout.fp8 and self.actor.fp8 is None
        value = self.algorithm.log_prob_gap_max
        return (1e-3 if exact else None) if value == "auto" else value  # type: ignore[return-value]

    @property
    def fp8_rows(self) -> bool:
        """rollout.fp8_rows with null resolved."""
        return self.actor.fp8 == "blockwise" if self.rollout.fp8_rows is None else self.rollout.fp8_rows

    @property
    def ratio_deviation_gate(self) -> float | None:
        """algorithm.ratio_deviation_max with auto resolved; None: no gate."""
        value = self.algorithm.ratio_deviation_max
        return (1e-4 if self.model.dtype == "float32" and self.actor.fp8 is None else None) if value == "auto" else value  # type: ignore[return-value]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without the keys that have no effect here."""
        return _plain(self, "", dict(inapplicable(self)))

    def to_yaml(self) -> str:
        """The resolved configuration; loading it again for the same kind gives an equal Config."""
        return yaml.dump(self.to_dict(), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


class _Dumper(yaml.SafeDumper):
    pass


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if text in NULL_WORDS else None)


_Dumper.add_representer(str, _represent_text)


def _plain(section: Any, path: str, without: dict[str, str]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for item in dataclasses.fields(section):
        full = f"{path}{item.name}"
        value = getattr(section, item.name)
        if full in without or full == "kind" or (path == "" and value is None):
            continue
        result[item.name] = _plain(value, full + ".", without) if dataclasses.is_dataclass(value) else (
            list(value) if isinstance(value, tuple) else value)
    return result


def inapplicable(c: Config) -> list[tuple[str, str]]:
    """Keys that have no effect in `c`, as (path, why). A set key at or below such a path is an error."""
    rules: list[tuple[bool, list[str], str]] = [
        (c.kind == "sft", ["rollout", "algorithm", "reward", "evaluation", "reference", "critic", "warm_up", "run.steps", "run.only",
                           "actor.updates_per_step", "actor.log_prob_micro_batch_size", "actor.skip_old_log_probs", "run.strict",
                           "log.samples_per_step", "data.answer_field"],
         "mcore-rl sft does not use it (the number of steps is sft.steps)"),
        (c.kind != "sft", ["sft"], f"mcore-rl {c.kind} does not use it; it is for mcore-rl sft"),
        (c.kind != "sft", ["data.response_field"], "only mcore-rl sft learns from responses"),
        (c.kind != "train" or c.run.only is not None or c.rollout.replay is not None, ["actor.offload"],
         "trainer and engine do not take turns: only mcore-rl train without run.only and rollout.replay does so"),
        (c.actor.max_tokens_per_micro_batch is not None, ["actor.micro_batch_size", "actor.log_prob_micro_batch_size"],
         "actor.max_tokens_per_micro_batch is set and takes its place; remove one of the two"),
        (c.model.init is not None and c.model.init.family != "qwen3_moe", [f"model.init.{key}" for key in ("num_experts", "experts_per_token", "moe_intermediate_size")],
         "model.init.family has no experts; set it to qwen3_moe or remove the key"),
        (c.actor.recompute != "selective", ["actor.recompute_modules"], "actor.recompute is not selective"),
        (not c.actor.moe.loss, ["actor.moe.aux_loss_coefficient"], "actor.moe.balancing is no auxiliary loss"),
        (c.actor.moe.balancing != "bias", ["actor.moe.bias_update_rate"], "actor.moe.balancing is not bias"),
        (c.kind != "train" or c.rollout.engine != "embedded" or c.rollout.replay is not None, ["actor.moe.replay_experts"],
         "it repeats the choices of the embedded engine in this run: only mcore-rl train with rollout.engine: embedded and without rollout.replay has them"),
        (c.algorithm.name == "grpo", ["critic", "algorithm.gamma", "algorithm.lam", "algorithm.kl_in"],
         "algorithm.name is grpo, which has no critic; set algorithm.name: ppo or remove the key"),
        (c.critic.max_tokens_per_micro_batch is not None, ["critic.micro_batch_size", "critic.value_micro_batch_size"],
         "critic.max_tokens_per_micro_batch is set and takes its place; remove one of the two"),
        (c.algorithm.kl_coefficient == 0, ["reference", "algorithm.kl_estimator", "algorithm.kl_in"],
         "algorithm.kl_coefficient is 0, so no reference is loaded; set it above 0 or remove the key"),
        (c.algorithm.advantage_normalisation == "none", ["algorithm.advantage_eps"], "algorithm.advantage_normalisation is none"),
        (c.reward.name != "function", ["reward.function"], f"reward.name is {c.reward.name}; set reward.name: function or remove the key"),
        (c.evaluation.samples == 0, ["evaluation.temperature"], "evaluation.samples is 0, so nothing is sampled"),
        (c.evaluation.data is None, ["evaluation.greedy", "evaluation.samples", "evaluation.max_prompts"], "evaluation.data is not set"),
        (c.data.prompt_format == "text", ["data.system_prompt"],
         "data.prompt_format is text; set data.prompt_format: chat or remove the key"),
        (c.rollout.engine == "embedded", ["rollout.tensorrt_llm"], "rollout.engine is embedded; set rollout.engine: tensorrt_llm or remove the key"),
        (not c.rollout.fp8, ["rollout.fp8_rows"], "rollout.fp8 is false"),
        (c.rollout.engine != "embedded", ["rollout.fp8"], "rollout.engine is tensorrt_llm, whose FP8 weights are not synchronised yet"),
        (c.checkpoint.every == 0, ["checkpoint.keep"], "checkpoint.every is 0, so none is written"),
        (c.run.only == "rollout", ["rollout.replay"], "run.only is rollout: samples are generated, not replayed"),
    ]
    for role, optimizer in (("actor", c.actor.optimizer), ("critic", c.critic.optimizer)):
        rules.append((optimizer.schedule == "constant", [f"{role}.optimizer.min_lr", f"{role}.optimizer.decay_steps"],
                      f"{role}.optimizer.schedule is constant; set it to linear or cosine, or remove the key"))
    return [(path, why) for applies, paths, why in rules if applies for path in paths]


def _contradictions(c: Config) -> list[tuple[bool, str]]:
    r, e = c.rollout, c.evaluation
    learns = c.kind == "train" and c.run.only is None
    rules: list[tuple[bool, Callable[[], str]]] = [
        (learns and c.algorithm.name == "grpo" and r.samples_per_prompt < 2,
         lambda: "rollout.samples_per_prompt is 1, but algorithm grpo compares the samples of one prompt with each other; "
                 "set at least 2"),
        (learns and r.temperature == 0, lambda: "rollout.temperature is 0 (greedy): all samples of a prompt would be equal and nothing is "
                                                "learnt; set it above 0, such as 1.0"),
        (learns and c.actor.skip_old_log_probs and c.actor.updates_per_step > 1,
         lambda: f"actor.skip_old_log_probs is true with actor.updates_per_step {c.actor.updates_per_step}: from the second update on the "
                 "old log-probs would be wrong; set it to false or make one update per step"),
        (c.actor.fp8 not in (None, "blockwise") and c.actor.layer_implementation == "torch",
         lambda: f"actor.fp8 {c.actor.fp8} is a recipe of Transformer Engine; set actor.layer_implementation: te, or actor.fp8: blockwise (emulated)"),
        (learns and c.actor.skip_old_log_probs and c.algorithm.kl_in == "reward",
         lambda: "actor.skip_old_log_probs is true with algorithm.kl_in reward, whose KL is that of the old log-probs; set it to false"),
        (e.every > 0 and e.data is None,
         lambda: f"evaluation.every is {e.every}, but evaluation.data is not set; give a file of held-out rows"),
        (c.kind == "evaluate" and e.data is None, lambda: "evaluation.data is not set; mcore-rl evaluate needs a file of held-out rows"),
        (e.data is not None and not e.greedy and e.samples == 0,
         lambda: "evaluation.greedy is false and evaluation.samples is 0, so nothing would be evaluated; set one of them"),
        (c.reward.name == "function" and not c.reward.function,
         lambda: "reward.name is function, but reward.function is not set; give package.module:function"),
        (c.reward.name != "function" and c.kind != "sft" and c.data.answer_field is None,
         lambda: f"data.answer_field is null, but reward {c.reward.name} compares with an answer; name the field"),
        (c.kind == "sft" and c.sft is None, lambda: "the section sft is missing; mcore-rl sft needs sft.output and sft.steps"),
    ]
    rules += [rule for name, role, updates in _trained(c) for rule in _role_contradictions(c, name, role, updates, learns)]
    return [(broken, text() if broken else "") for broken, text in rules]


def _trained(c: Config) -> list[tuple[str, ActorConfig | CriticConfig, int]]:
    """(name, section, optimizer steps of the run) of the roles that are trained."""
    critic = [("critic", c.critic, c.run.steps * c.critic.updates_per_step)] if c.has_critic else []
    return [("actor", c.actor, c.total_updates), *critic]


def _role_contradictions(c: Config, name: str, role: ActorConfig | CriticConfig, updates: int, learns: bool) -> list[tuple[bool, Callable[[], str]]]:
    o, r, budget = role.optimizer, c.rollout, role.max_tokens_per_micro_batch
    decay, samples = o.decay_steps or updates, r.prompts_per_step * r.samples_per_prompt
    longest, told = ((c.data.max_prompt_tokens + r.max_tokens, "data.max_prompt_tokens + rollout.max_tokens") if learns else
                     (c.sft.max_sequence_tokens if c.kind == "sft" and c.sft else None, "sft.max_sequence_tokens"))
    return [
        (o.schedule != "constant" and o.min_lr > o.lr,
         lambda: f"{name}.optimizer.min_lr {o.min_lr:g} is above {name}.optimizer.lr {o.lr:g}; lower min_lr or raise lr"),
        (c.run.only is None and c.kind != "evaluate" and o.schedule != "constant" and o.warmup_steps >= decay,
         lambda: f"{name}.optimizer.warmup_steps {o.warmup_steps} is not below the {decay} steps of the decay; lower it or raise decay_steps"),
        (learns and bool(samples % role.updates_per_step),
         lambda: f"{name}.updates_per_step {role.updates_per_step} does not divide the {samples} samples of a step "
                 f"(rollout.prompts_per_step {r.prompts_per_step} x rollout.samples_per_prompt {r.samples_per_prompt}); choose a divisor"),
        (budget is not None and longest is not None and longest > budget,
         lambda: f"{name}.max_tokens_per_micro_batch {budget} is less than the {longest} tokens of the longest sequence ({told}); "
                 "raise it or lower those"),
        (role.packing == "shared_prompt" and c.actor.layer_implementation == "te", lambda: f"{name}.{SHARED_NEEDS_TORCH}"),
    ]
