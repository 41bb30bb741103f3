"""The `trtllm` layout: rank-local fused tensors of TensorRT-LLM's PyTorch backend, which the embedded engine holds too."""

from __future__ import annotations

from functools import lru_cache, partial

import torch

from parallel.errors import UserError
from parallel.families.base import Parameter
from parallel.model_config import ModelConfig
from resharding.layout import Blockwise, Layout, LocalTensor, Piece, Shard, View, block_parameters, blocks_of, stored_dtype
from resharding.layouts.cut import Ingredients, Run, cut, ingredients_of, share, stacked, vocabulary


class TrtllmParty(Blockwise):
    """All ranks of all replicas of an engine. See `trtllm_party`."""

    def __init__(self, model: ModelConfig, replicas: tuple[tuple[int, ...], ...], dtype: torch.dtype, moe_ep: int, tied_head: bool) -> None:
        self.model, self.replicas, self.dtype, self.moe_ep, self.tied_head = model, replicas, dtype, moe_ep, tied_head
        self.tp = len(replicas[0])
        self._stages = blocks_of(model)
        super().__init__("trtllm", tuple(rank for replica in replicas for rank in replica), len(self._stages), self._make)

    def _make(self, block: int) -> tuple[Shard, ...]:
        stage, layer = self._stages[block]
        names: dict[str, list[Parameter]] = {}
        for p in block_parameters(self.model, stage, layer):
            names.setdefault(p.trtllm.format(layer=layer), []).append(p)
        if stage == "embedding" and self.model.tied and self.tied_head:
            names["lm_head.weight"] = list(block_parameters(self.model, stage, layer))
        out: list[Shard] = []
        for name, parameters in names.items():
            by_rank = [tuple(replica[t] for replica in self.replicas) for t in range(self.tp)]
            if self._is_whole(parameters):
                by_rank = [tuple(rank for replica in self.replicas for rank in replica)]
            out += [Shard(ranks, partial(self._tensor, name, parameters, layer, t)) for t, ranks in enumerate(by_rank)]
        return tuple(out)

    def _is_whole(self, parameters: list[Parameter]) -> bool:
        """Whether every rank holds the same: one shard then, whose replicas share the sending."""
        p = parameters[0]
        return not p.expert and (len(parameters) > 1 or (p.te_kind or p.kind) == "replicated")

    def _tensor(self, name: str, parameters: list[Parameter], layer: int, tp_rank: int) -> LocalTensor:
        dtype = stored_dtype(parameters[0], self.dtype)
        if parameters[0].expert:
            return rank_experts(name, parameters[0], self.model, layer, self.tp // self.moe_ep, self.moe_ep, tp_rank, dtype)
        if len(parameters) == 1:
            return self._dense(name, parameters[0], layer, tp_rank, dtype)
        runs: list[Run] = [(n, 0, s[0]) for p in parameters for n, s in ingredients_of(p, layer)]
        return stacked(name, runs, parameters[0].hf[0][1][1:], dtype)  # one product of several: whole on every rank

    def _dense(self, name: str, p: Parameter, layer: int, tp_rank: int, dtype: torch.dtype) -> LocalTensor:
        ingredients = ingredients_of(p, layer)
        if p.kind == "qkv":
            return rank_qkv(name, ingredients, self.model, self.tp, tp_rank, dtype)
        if p.kind == "vocabulary":
            return vocabulary(name, ingredients, -(-self.model.vocab_size // self.tp), tp_rank, dtype)
        kind = p.te_kind or p.kind  # the engine's latent down-projections are whole, as Transformer Engine's are
        return cut(name, kind, ingredients, self.tp, tp_rank, dtype)


@lru_cache(maxsize=64)
def trtllm_party(model: ModelConfig, replicas: tuple[tuple[int, ...], ...], dtype: torch.dtype, moe_ep: int = 1,
                 tied_head: bool = False) -> TrtllmParty:
    """What TensorRT-LLM's PyTorch backend (and the embedded engine) holds; `replicas` lists the world ranks of each, in tp order.

    Fused tensors are fused per rank: `qkv_proj` = [q; k; v] and `gate_up_proj` = [gate; up], each ingredient cut on dim 0
    before; a key/value head is repeated tp / num_kv_heads times where tp exceeds the heads. Experts are stacked:
    `w3_w1_weight` [experts / moe_ep, up rows above gate rows, hidden], `w2_weight` [experts / moe_ep, hidden, ffn / moe_tp],
    with moe_tp = tp / moe_ep. Vocabulary rows are cut to ceil(V / tp) and the tail is padding. A tied model has no
    `lm_head.weight` unless `tied_head` asks for a copy of its own. Raises UserError where a size does not divide.
    """
    tp = len(replicas[0])
    if any(len(replica) != tp for replica in replicas):
        raise UserError(f"engine replicas have {sorted({len(r) for r in replicas})} ranks; all must have the same number")
    if tp % moe_ep or (model.moe is not None and model.moe.num_experts % moe_ep):
        experts = f" and the {model.moe.num_experts} experts of the model" if model.moe else ""
        raise UserError(f"engine moe_ep={moe_ep} does not divide tp={tp}{experts}; choose a divisor of both")
    if model.head == "value":
        raise UserError(f"this {model.family} model has a value head (score.weight) and none over the vocabulary: an engine cannot generate with it")
    return TrtllmParty(model, replicas, dtype, moe_ep, tied_head)


def trtllm_layout(model: ModelConfig, tp: int, tp_rank: int, rank: int, dtype: torch.dtype, tied_head: bool = False,
                  moe_ep: int = 1) -> Layout:
    """What rank `tp_rank` of one replica of `tp` ranks holds (see `trtllm_party`); `rank` is its world rank."""
    held = trtllm_party(model, (tuple(range(tp)),), dtype, moe_ep, tied_head).layout(tp_rank)
    return Layout("trtllm", rank, held.tensors)


def rank_qkv(name: str, ingredients: Ingredients, model: ModelConfig, tp: int, tp_rank: int, dtype: torch.dtype) -> LocalTensor:
    """[q; k; v] of one rank; a key/value head is repeated where tp exceeds the heads. Raises UserError where heads do not divide."""
    q = share(model.num_heads, tp, "num_attention_heads") * model.head_dim
    if tp <= model.num_kv_heads:
        first, heads = tp_rank * share(model.num_kv_heads, tp, "num_key_value_heads"), model.num_kv_heads // tp
    else:
        if tp % model.num_kv_heads:
            raise UserError(f"engine tp={tp} is not a multiple of num_key_value_heads {model.num_kv_heads}; "
                            "choose a multiple or a divisor of it")
        first, heads = tp_rank * model.num_kv_heads // tp, 1
    kv = (first * model.head_dim, (first + heads) * model.head_dim)
    (q_name, q_shape), (k_name, _), (v_name, _) = ingredients
    return stacked(name, [(q_name, tp_rank * q, (tp_rank + 1) * q), (k_name, *kv), (v_name, *kv)], q_shape[1:], dtype)


def rank_experts(name: str, p: Parameter, model: ModelConfig, layer: int, moe_tp: int, moe_ep: int, tp_rank: int,
                 dtype: torch.dtype) -> LocalTensor:
    """The experts of moe_ep rank `tp_rank % moe_ep`, each cut for moe_tp rank `tp_rank // moe_ep`, stacked: up above gate."""
    assert model.moe is not None
    local = model.moe.num_experts // moe_ep
    pieces: list[Piece] = []
    inner: tuple[int, ...] = ()
    for i in range(local):
        ingredients = ingredients_of(p, layer, tp_rank % moe_ep * local + i)
        one = cut(name, p.kind, ingredients, moe_tp, tp_rank // moe_ep, dtype, up_first=True)
        pieces += [Piece(x.canonical, x.region, x.offset, View((i,))) for x in one.pieces]
        inner = one.shape
    return LocalTensor(name, (local, *inner), dtype, tuple(pieces))
