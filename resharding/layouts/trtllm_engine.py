"""The `trtllm_engine` layout: classic TensorRT-LLM checkpoints (`config.json` and `rank{N}.safetensors`), input of `trtllm-build`.

Source: tensorrt_llm/models/{llama,qwen}/convert.py and layers/moe.py (before the engine backend was removed in 1.3), and
megatron/core/export/trtllm, whose converters give the same bytes for dense models and Mixtral (tests/resharding/test_trtllm_engine.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from parallel.errors import UserError
from parallel.families.base import MC, Parameter
from parallel.model_config import ModelConfig
from resharding.layout import Layout, LocalTensor, block_parameters, blocks_of, stored_dtype
from resharding.layouts.cut import cut, ingredients_of, vocabulary
from resharding.layouts.trtllm import rank_experts, rank_qkv

FAMILIES = ("llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "mixtral")
EMBEDDING, HEAD = "transformer.vocab_embedding.weight", "lm_head.weight"

# Megatron's parameter (local spec) -> its name here. Of two names, each is a tensor of one ingredient: a dense `fc` is the gate
# projection and `gate` the up projection (upstream's GatedMLP), while the `fc` of experts holds both, up above gate.
_NAMES: dict[str, tuple[str, ...]] = {
    "embedding.word_embeddings.weight": (EMBEDDING,),
    "decoder.final_layernorm.weight": ("transformer.ln_f.weight",),
    "output_layer.weight": (HEAD,),
    **{MC + ours: tuple("transformer.layers.{layer}." + name for name in theirs) for ours, theirs in {
        "input_layernorm.weight": ("input_layernorm.weight",),
        "self_attention.linear_qkv.weight": ("attention.qkv.weight",),
        "self_attention.linear_qkv.bias": ("attention.qkv.bias",),
        "self_attention.linear_proj.weight": ("attention.dense.weight",),
        "self_attention.q_layernorm.weight": ("attention.q_layernorm.weight",),
        "self_attention.k_layernorm.weight": ("attention.k_layernorm.weight",),
        "pre_mlp_layernorm.weight": ("post_layernorm.weight",),
        "mlp.linear_fc1.weight": ("mlp.fc.weight", "mlp.gate.weight"),
        "mlp.linear_fc2.weight": ("mlp.proj.weight",),
        "mlp.router.weight": ("mlp.router.weight",),
        "mlp.experts.local_experts.{expert}.linear_fc1.weight": ("mlp.fc.weight",),
        "mlp.experts.local_experts.{expert}.linear_fc2.weight": ("mlp.proj.weight",),
        "mlp.shared_experts.linear_fc1.weight": ("mlp.shared_expert.fc.weight",),
        "mlp.shared_experts.linear_fc2.weight": ("mlp.shared_expert.proj.weight",),
        "mlp.shared_experts.gate_weight": ("mlp.shared_expert_gate.weight",),
    }.items()},
}
_ROUTER = MC + "mlp.router.weight"  # float32 in the engine whatever the model's dtype


@dataclass(frozen=True)
class EngineMapping:
    """Parallel sizes of an engine, which validate themselves. Of moe_tp and moe_ep one or both may be None: experts are cut by tp."""

    tp: int = 1
    pp: int = 1
    moe_tp: int | None = None
    moe_ep: int | None = None
    parallel_embedding: bool = False

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "moe_tp", "moe_ep"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"engine {name} is {value}; it must be at least 1")
        if self.expert_tp * self.expert_ep != self.tp:
            raise UserError(f"engine moe_tp {self.expert_tp} x moe_ep {self.expert_ep} is not tp {self.tp}; experts are cut over the same ranks")

    @property
    def world_size(self) -> int:
        return self.tp * self.pp

    @property
    def expert_tp(self) -> int:
        return self.moe_tp if self.moe_tp is not None else max(1, self.tp // (self.moe_ep or 1))

    @property
    def expert_ep(self) -> int:
        return self.moe_ep if self.moe_ep is not None else max(1, self.tp // self.expert_tp)

    def check(self, model: ModelConfig) -> None:
        """Raise UserError for a model that this format cannot hold, or that does not divide."""
        if model.family not in FAMILIES:
            raise UserError(f"a {model.family} model cannot be written as a classic TensorRT-LLM checkpoint: that path knows {', '.join(FAMILIES)}; "
                            "give TensorRT-LLM's PyTorch backend the Hugging Face directory")
        if model.moe is not None and len(model.moe.layers) != model.num_layers:
            dense = sorted(set(range(model.num_layers)) - model.moe_layers)
            raise UserError(f"a classic TensorRT-LLM checkpoint has experts in every layer or in none; this {model.family} model has none in "
                            f"{', '.join(map(str, dense[:8]))}: give TensorRT-LLM's PyTorch backend the Hugging Face directory")
        if model.num_layers % self.pp:
            raise UserError(f"engine pp={self.pp} does not divide the {model.num_layers} layers of the model")
        if model.moe is not None and (model.moe.num_experts % self.expert_ep or model.moe.intermediate_size % self.expert_tp):
            raise UserError(f"engine moe_ep={self.expert_ep} must divide the {model.moe.num_experts} experts of the model, and "
                            f"moe_tp={self.expert_tp} their intermediate size {model.moe.intermediate_size}")
        for p in (p for stage, layer in blocks_of(model) for p in block_parameters(model, stage, layer)):
            if p.mcore not in _NAMES:
                raise UserError(f"a classic TensorRT-LLM checkpoint has no place for {p.hf[0][0].format(layer=0, expert=0)} of a "
                                f"{model.family} model")


def trtllm_engine_layout(model: ModelConfig, tp: int, pp: int, rank: int, dtype: torch.dtype, moe_tp: int | None = None,
                         moe_ep: int | None = None, parallel_embedding: bool = False) -> Layout:
    """What `rank{rank}.safetensors` holds, rank = pp_rank * tp + tp_rank.

    Layers are numbered from 0 in every stage; `vocab_embedding` is on the first stage, whole, or with `parallel_embedding` cut by
    rows; `ln_f` and `lm_head` on the last, the head padded to ceil(V / tp) * tp rows and present also where it is tied.
    `qkv` = [q; k; v] of the rank, key/value heads repeated where tp exceeds them; dense `fc` [ffn / tp, hidden] is the gate and
    `gate` the up projection; of experts `fc` [experts / moe_ep, up rows above gate rows, hidden] and `proj`
    [experts / moe_ep, hidden, ffn / moe_tp]; the router is float32. Raises UserError for families that the format does not
    know and sizes that do not divide.
    """
    mapping = EngineMapping(tp, pp, moe_tp, moe_ep, parallel_embedding)
    mapping.check(model)
    if model.head == "value":
        raise UserError(f"this {model.family} model has a value head (score.weight) and none over the vocabulary: an engine cannot generate with it")
    if not 0 <= rank < mapping.world_size:
        raise UserError(f"engine rank {rank} does not exist with tp {tp} x pp {pp} = {mapping.world_size} ranks")
    pp_rank, tp_rank = divmod(rank, tp)
    per_stage = model.num_layers // pp
    tensors: list[LocalTensor] = []
    for stage, layer in blocks_of(model):
        owner = {"embedding": 0, "layer": layer // per_stage}.get(stage, pp - 1)
        for p in block_parameters(model, stage, layer):
            if owner == pp_rank:
                tensors += _tensors(p, model, mapping, layer, layer % per_stage, tp_rank, dtype)
            if stage == "embedding" and model.tied and pp_rank == pp - 1:
                tensors.append(vocabulary(HEAD, ingredients_of(p, layer), -(-model.vocab_size // tp), tp_rank, dtype))
    return Layout("trtllm_engine", rank, tuple(tensors))


def _tensors(p: Parameter, model: ModelConfig, mapping: EngineMapping, layer: int, local: int, tp_rank: int,
             dtype: torch.dtype) -> list[LocalTensor]:
    names = [name.format(layer=local) for name in _NAMES[p.mcore]]
    ingredients = ingredients_of(p, layer)
    dtype = torch.float32 if p.mcore == _ROUTER else stored_dtype(p, dtype)
    if p.expert:
        return [rank_experts(names[0], p, model, layer, mapping.expert_tp, mapping.expert_ep, tp_rank, dtype)]
    if len(names) > 1:
        return [cut(name, "column", (one,), mapping.tp, tp_rank, dtype) for name, one in zip(names, ingredients, strict=True)]
    if p.kind == "qkv":
        return [rank_qkv(names[0], ingredients, model, mapping.tp, tp_rank, dtype)]
    if p.kind == "vocabulary":
        if names[0] == EMBEDDING and not mapping.parallel_embedding:
            return [cut(EMBEDDING, "replicated", ingredients, mapping.tp, tp_rank, dtype)]
        return [vocabulary(names[0], ingredients, -(-model.vocab_size // mapping.tp), tp_rank, dtype)]
    return [cut(names[0], p.kind, ingredients, mapping.tp, tp_rank, dtype, up_first=True)]
