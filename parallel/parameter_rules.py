"""Which parameters train, and which decay, by patterns on canonical names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from parallel.errors import UserError
from parallel.families import FAMILIES
from parallel.families.base import Parameter
from parallel.model_config import ModelConfig

if TYPE_CHECKING:
    from parallel.training import TrainingModel

# Megatron's rule, that vectors do not decay, in canonical names
NO_WEIGHT_DECAY = ("*bias", "*norm.weight", "*sinks")


def check_patterns(model: ModelConfig, freeze: Sequence[str], no_weight_decay: Sequence[str], role: str = "actor") -> None:
    """Refuse a pattern that matches no parameter, and one that matches a part of what Megatron holds as one matrix. Raises UserError."""
    every = [names for _, names in _model_parameters(model)]
    for key, patterns in ((f"{role}.freeze", freeze), (f"{role}.optimizer.no_weight_decay", no_weight_decay)):
        for pattern in patterns:
            matched = [names for names in every if any(fnmatchcase(name, pattern) for name in names)]
            if not matched and pattern not in NO_WEIGHT_DECAY:
                shown = ", ".join(dict.fromkeys(name for names in every[:12] for name in names[:2]))
                raise UserError(f"{key}: {pattern!r} matches no parameter of the model; its names are {shown}, ...")
        for names in every:
            chosen = [name for name in names if matches(name, patterns)]
            if chosen and len(chosen) < len(names):
                raise UserError(f"{key} matches {chosen[0]} and not {next(n for n in names if n not in chosen)}, which Megatron-Core holds as one matrix; "
                                "match all of them or none")
    if freeze and all(matches(name, freeze) for names in every for name in names):
        raise UserError(f"{role}.freeze matches every parameter of the model: nothing would be trained; match fewer")


def frozen_in_some_layers(model: ModelConfig, patterns: Sequence[str]) -> str | None:
    """A frozen parameter that is not frozen in another layer (or expert); None where there is none.

    Megatron's checkpoints stack the optimizer's tensors over layers, and cannot be written with gaps.
    """
    frozen: dict[str, dict[bool, str]] = {}
    for p, names in _model_parameters(model):
        frozen.setdefault(p.mcore, {})[matches(names[0], patterns)] = names[0]
    return next((found[True] for found in frozen.values() if len(found) == 2), None)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a canonical name matches one of the patterns (`*`, `?`, `[...]`; a dot is no boundary)."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def chosen(training: TrainingModel, patterns: Sequence[str], rank: int, world_size: int) -> set[int]:
    """Identities (`id`) of this rank's parameters that match one of `patterns`. A parameter that is no canonical tensor goes by its own name."""
    names = dict(_rank_parameters(training, rank, world_size))
    several = len(training.modules) > 1
    return {id(p) for i, module in enumerate(training.modules) for name, p in module.named_parameters()
            if matches(names.get((f"chunk{i}." if several else "") + name, (name,))[0], patterns)}


def _model_parameters(model: ModelConfig) -> Iterator[tuple[Parameter, tuple[str, ...]]]:
    """Every parameter of the model with the canonical tensors it is made of. The correction bias of a router is a buffer."""
    for p in FAMILIES[model.family].parameters(model):
        if p.mcore.endswith("router.expert_bias"):
            continue
        for layer in _layers(p, model):
            for expert in range(model.moe.num_experts if p.expert and model.moe else 1):
                yield p, _canonical(p, layer, expert)


def _layers(p: Parameter, model: ModelConfig) -> list[int]:
    if p.stage != "layer":
        return [0]
    return [i for i in range(model.num_layers) if p.layers == "all" or (i in model.moe_layers) == (p.layers == "moe")]


def _canonical(p: Parameter, layer: int, expert: int) -> tuple[str, ...]:
    return tuple(name.format(layer=layer, expert=expert) for name, _ in p.hf)


def _rank_parameters(training: TrainingModel, rank: int, world_size: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """This rank's parameter names (as in `TrainingModel.tensors`) with the canonical tensors they are made of."""
    model, parallel = training.model, training.parallel
    experts = model.moe.num_experts // parallel.ep if model.moe else 1
    first_expert = parallel.expert_coordinates(rank, world_size).ep * experts
    where: dict[int, tuple[str, int]] = {}
    for chunk in range(parallel.chunks):
        prefix = f"chunk{chunk}." if parallel.chunks > 1 else ""
        where.update({layer: (prefix, local) for local, layer in enumerate(parallel.layers(model, training.at.pp, chunk))})
    several = parallel.chunks > 1
    for p in FAMILIES[model.family].parameters(model):
        name = p.mcore_te if training.names == "te" and p.mcore_te else p.mcore
        if p.stage == "layer":
            for layer in (i for i in _layers(p, model) if i in where):
                prefix, local = where[layer]
                for expert in range(experts if p.expert else 1):
                    yield prefix + name.format(layer=local, expert=expert), _canonical(p, layer, first_expert + expert)
        else:
            for chunk in range(parallel.chunks):  # a stage that does not have it has no such name either
                yield (f"chunk{chunk}." if several else "") + name, _canonical(p, 0, 0)
                if p.stage == "embedding" and model.tied:
                    yield (f"chunk{chunk}." if several else "") + "output_layer.weight", _canonical(p, 0, 0)


def freeze(training: TrainingModel, patterns: Sequence[str], rank: int, world_size: int) -> None:
    """Take the matching parameters out of training, before gradients and optimizer are made."""
    frozen = chosen(training, patterns, rank, world_size)
    for module in training.modules:
        for parameter in module.parameters():
            if id(parameter) in frozen:
                parameter.requires_grad_(False)


def overrides(training: TrainingModel, patterns: Sequence[str], rank: int, world_size: int) -> dict[Any, Any]:
    """Megatron's parameter groups: those that match `patterns` have no weight decay."""
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

    without = chosen(training, patterns, rank, world_size)
    return {ParamKey(predicate=ParamPredicate("no_weight_decay", lambda p: id(p) in without)): {"wd_mult": 0.0}}
