"""The `mcore_files` layout: the tensors of Megatron-Core's distributed checkpoints (`torch_dist`), whole, whatever layout wrote them.

Layers that are all alike are stacked: `decoder.layers.mlp.linear_fc1.weight` [layers, gate rows above up rows, hidden], and experts below
them: `decoder.layers.mlp.experts.experts.linear_fc1.weight` [layers, experts, ...]. Where some layers have experts and some do not, each has keys of
its own: `decoder.layers.3.mlp...`. Source: `TransformerBlock`, `MLP`, `SequentialMLP` and `TEGroupedMLP.sharded_state_dict` of megatron-core 0.16.1.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from parallel.config import ParallelConfig
from parallel.families.base import Parameter
from parallel.model_config import ModelConfig
from resharding.boxes import Box
from resharding.layout import Layout, LocalTensor, Piece, View, block_parameters, blocks_of, stored_dtype
from resharding.layouts.cut import cut, ingredients_of, query_groups, stacked, vocabulary

LAYERS, EXPERTS = "decoder.layers.{layer}.", "local_experts.{expert}."
_FUSED_NORM = "mlp.linear_fc1.layer_norm_weight"


@dataclass(frozen=True)
class StoredTensor:
    """One key of a checkpoint: the whole tensor, and into how many equal chunks (tp, pp, ep) ranks would cut each of its dimensions."""

    tensor: LocalTensor
    cuts: tuple[int, ...]

    def chunks(self) -> Iterator[Box]:
        """The boxes of the chunks, first dimension slowest."""
        sizes = [size // n for size, n in zip(self.tensor.shape, self.cuts, strict=True)]
        for index in itertools.product(*(range(n) for n in self.cuts)):
            yield tuple((i * size, (i + 1) * size) for i, size in zip(index, sizes))


def stores_layers_apart(model: ModelConfig) -> bool:
    """Whether Megatron gives every layer keys of its own: some of the layers have experts and some do not."""
    return model.moe is not None and len(model.moe_layers) != model.num_layers


def keys_of(p: Parameter) -> tuple[str, ...]:
    """The names under which checkpoints hold a parameter, as templates of layer: Transformer Engine's name, the one we write, first.

    Megatron's local spec renames its norms to that, except where it does not: in layers with experts, whose norm before the experts
    it also calls by the name that a dense layer's has, and in latent attention.
    """
    names = [p.mcore_te if p.mcore_te and not p.expert else p.mcore, p.mcore]
    if p.layers == "moe" and p.mcore.endswith("pre_mlp_layernorm.weight"):
        names.append(LAYERS + _FUSED_NORM)
    return tuple(dict.fromkeys(name.replace(EXPERTS, "experts.") for name in names))


def mcore_files(model: ModelConfig, dtype: torch.dtype, parallel: ParallelConfig = ParallelConfig(), vocabulary_rows: int | None = None,
                apart: bool | None = None, held: Collection[str] | None = None) -> tuple[StoredTensor, ...]:
    """Every weight of a checkpoint of the model, in the order of the model.

    `parallel` sets the chunks and the padding of the vocabulary, which `vocabulary_rows` overrides; `apart` whether layers are stacked
    or have keys of their own (None: as Megatron has it for this model); `held` are the keys of a directory, among which that of
    a norm is chosen. Raises UserError where a size does not divide.
    """
    rows = vocabulary_rows or model.padded_vocab_size(parallel.tp)
    apart = stores_layers_apart(model) if apart is None else apart
    places: dict[str, list[tuple[Parameter, int]]] = defaultdict(list)
    for stage, layer in blocks_of(model):
        for p in block_parameters(model, stage, layer):
            places[_key(p, layer, apart, held)].append((p, layer))
    return tuple(_stored(key, where, model, dtype, parallel, rows, apart) for key, where in places.items())


def mcore_files_layout(model: ModelConfig, dtype: torch.dtype, parallel: ParallelConfig = ParallelConfig(), vocabulary_rows: int | None = None,
                       apart: bool | None = None, held: Collection[str] | None = None, rank: int = 0) -> Layout:
    """`mcore_files` as a layout: one local tensor per key."""
    return Layout("mcore_files", rank, tuple(s.tensor for s in mcore_files(model, dtype, parallel, vocabulary_rows, apart, held)))


def _key(p: Parameter, layer: int, apart: bool, held: Collection[str] | None) -> str:
    keys = [name.replace("{layer}", str(layer)) if apart else name.replace(".{layer}", "") for name in keys_of(p)]
    return next((key for key in keys if held is not None and key in held), keys[0])


def _stored(key: str, where: list[tuple[Parameter, int]], model: ModelConfig, dtype: torch.dtype, parallel: ParallelConfig, rows: int,
            apart: bool) -> StoredTensor:
    p = where[0][0]
    experts = model.moe.num_experts if p.expert and model.moe else 0
    layers = len(where) if p.stage == "layer" and not apart else 0
    pieces: list[Piece] = []
    inner: tuple[int, ...] = ()
    for i, (_, layer) in enumerate(where):
        for expert in range(experts or 1):
            one = _whole(key, p, model, layer, expert, rows, stored_dtype(p, dtype))
            view = View((i,) * bool(layers) + (expert,) * bool(experts))
            pieces += [Piece(x.canonical, x.region, x.offset, view) for x in one.pieces]
            inner = one.shape
    leading = (layers,) * bool(layers) + (experts,) * bool(experts)
    return StoredTensor(LocalTensor(key, (*leading, *inner), stored_dtype(p, dtype), tuple(pieces)), (*leading, *_cuts(p, inner, parallel)))


def _whole(key: str, p: Parameter, model: ModelConfig, layer: int, expert: int, rows: int, dtype: torch.dtype) -> LocalTensor:
    """What one layer (and expert) puts under a key: Megatron's tensor before it is cut over ranks."""
    ingredients = ingredients_of(p, layer, expert)
    if p.kind == "qkv":
        return stacked(key, query_groups(ingredients, model), ingredients[0][1][1:], dtype)
    if p.kind == "vocabulary":
        return vocabulary(key, ingredients, rows, 0, dtype)
    return cut(key, p.kind, ingredients, 1, 0, dtype)


def _cuts(p: Parameter, shape: tuple[int, ...], parallel: ParallelConfig) -> tuple[int, ...]:
    """Chunks along the dimensions of one layer's (and expert's) tensor. A cut that does not come out whole is left out:
    chunks are how a file is divided, not what it holds."""
    tp = parallel.expert_tp if p.expert else parallel.tp
    dim, parts = {"row": (1, tp), "gate_up": (0, 2 * tp), "replicated": (0, 1)}.get(p.te_kind or p.kind, (0, tp))
    return tuple(parts if d == dim and size % parts == 0 else 1 for d, size in enumerate(shape))


def extra_states(model: ModelConfig, apart: bool | None = None) -> list[str]:
    """Keys of the `_extra_state` objects that Megatron's modules ask for when they load: those of the local and of the Transformer Engine spec.

    Without FP8 they are empty; a loader fails where one is missing and lets one that it does not know be.
    """
    apart = stores_layers_apart(model) if apart is None else apart
    keys = ["decoder.final_layernorm._extra_state/shard_0_1"]
    for layer in range(model.num_layers):
        prefix = f"decoder.layers.{layer}." if apart else "decoder.layers."
        index, count = ("", "") if apart else (f"{layer}", f"{model.num_layers}")
        for name in _modules(model, layer):
            if name.startswith("mlp.experts") and model.moe:
                for expert in range(model.moe.num_experts):
                    at, of = (f"{index}.{expert}", f"{count}.{model.moe.num_experts}") if not apart else (f"{expert}", f"{model.moe.num_experts}")
                    keys.append(f"{prefix}{name}._extra_state/shard_{at}_{of}")
            else:
                keys.append(f"{prefix}{name}._extra_state/shard_{index or 0}_{count or 1}")
    return keys


def _modules(model: ModelConfig, layer: int) -> list[str]:
    """Modules of a layer that have such an object."""
    attention = ["core_attention", "linear_proj", "q_layernorm"]
    attention += (["linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "kv_layernorm"]
                  if model.mla else ["linear_qkv", "k_layernorm"])
    blocks = ["mlp.experts.experts", "mlp.shared_experts"] if layer in model.moe_layers else ["mlp"]
    return ["input_layernorm", "pre_mlp_layernorm", *(f"self_attention.{name}" for name in attention),
            *(f"{block}.{name}" for block in blocks for name in ("linear_fc1", "linear_fc2"))]
