"""The `mcore` layout: what Megatron-Core's GPTModel holds on every rank."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache, partial
from typing import Literal

import torch

from parallel.config import ParallelConfig
from parallel.errors import UserError
from parallel.families.base import Parameter
from parallel.model_config import ModelConfig
from resharding.layout import Blockwise, Layout, LocalTensor, Shard, block_parameters, blocks_of, stored_dtype
from resharding.layouts.cut import Ingredients, cut, ingredients_of, query_groups, share, stacked, vocabulary, window

Names = Literal["local", "te"]


class McoreParty(Blockwise):
    """All ranks of one role. See `mcore_party`."""

    def __init__(self, model: ModelConfig, parallel: ParallelConfig, ranks: tuple[int, ...], dtype: torch.dtype, names: Names, head: bool) -> None:
        self._stages = blocks_of(model)
        super().__init__("mcore", ranks, len(self._stages), self._make)
        self.model, self.parallel, self.dtype, self.names, self.head = model, parallel, dtype, names, head
        world = len(ranks)
        self._dense: dict[tuple[int, int], list[int]] = defaultdict(list)  # (pp, tp) -> ranks
        self._expert: dict[tuple[int, int, int], list[int]] = defaultdict(list)  # (pp, ep, etp) -> ranks
        for i, rank in enumerate(ranks):
            at, expert = parallel.coordinates(i, world), parallel.expert_coordinates(i, world)
            self._dense[at.pp, at.tp].append(rank)
            self._expert[expert.pp, expert.ep, expert.etp].append(rank)
        self._owner = {layer: (pp, chunk, local) for pp in range(parallel.pp) for chunk in range(parallel.chunks)
                       for local, layer in enumerate(parallel.layers(model, pp, chunk))}

    def _make(self, block: int) -> tuple[Shard, ...]:
        stage, layer = self._stages[block]
        first, last = (0, 0), (self.parallel.pp - 1, self.parallel.chunks - 1)
        pp, chunk, local = self._owner[layer] if stage == "layer" else (*(first if stage == "embedding" else last), 0)
        out: list[Shard] = []
        for p in block_parameters(self.model, stage, layer):
            if stage != "head" or self.head:
                out += self._experts(p, pp, chunk, local, layer) if p.expert else self._tensors(p, None, pp, chunk, local, layer)
            if stage == "embedding" and self.model.tied and self.head and first != last:
                out += self._tensors(p, "output_layer.weight", *last, 0, 0)
        return tuple(out)

    def _tensors(self, p: Parameter, name: str | None, pp: int, chunk: int, local: int, layer: int) -> list[Shard]:
        name = self._prefix(chunk) + (name or self._template(p).format(layer=local))
        if self._kind(p) == "replicated":
            return [Shard(tuple(r for t in range(self.parallel.tp) for r in self._dense[pp, t]), partial(self._tensor, name, p, layer, 0, 1, 0))]
        return [Shard(tuple(self._dense[pp, t]), partial(self._tensor, name, p, layer, 0, self.parallel.tp, t)) for t in range(self.parallel.tp)]

    def _experts(self, p: Parameter, pp: int, chunk: int, local: int, layer: int) -> list[Shard]:
        assert self.model.moe is not None
        etp, whole, out = self.parallel.expert_tp, p.kind == "replicated", []
        per_rank = self.model.moe.num_experts // self.parallel.ep
        for expert in range(self.model.moe.num_experts):
            name = self._prefix(chunk) + self._template(p).format(layer=local, expert=expert % per_rank)
            holders = [self._expert[pp, expert // per_rank, t] for t in range(etp)]
            for t, ranks in enumerate([[r for held in holders for r in held]] if whole else holders):
                out.append(Shard(tuple(ranks), partial(self._tensor, name, p, layer, expert, 1 if whole else etp, t)))
        return out

    def _tensor(self, name: str, p: Parameter, layer: int, expert: int, tp: int, tp_rank: int) -> LocalTensor:
        ingredients = ingredients_of(p, layer, expert)
        return _tensor(name, self._kind(p), ingredients, self.model, tp, tp_rank, stored_dtype(p, self.dtype))

    def _kind(self, p: Parameter) -> str:
        return p.te_kind if self.names == "te" and p.te_kind else p.kind

    def _template(self, p: Parameter) -> str:
        return p.mcore_te if self.names == "te" and p.mcore_te else p.mcore

    def _prefix(self, chunk: int) -> str:
        return f"chunk{chunk}." if self.parallel.chunks > 1 else ""


@lru_cache(maxsize=64)
def mcore_party(model: ModelConfig, parallel: ParallelConfig, world_size: int, dtype: torch.dtype, names: Names = "local",
                head: bool = True, first_rank: int = 0) -> McoreParty:
    """What Megatron-Core's GPTModel holds on the ranks [first_rank, first_rank + world_size).

    Data- and context-parallel ranks are replicas. Names are GPTModel parameter names, `chunk{c}.` before them where the stage has
    several virtual pipeline chunks; layer indices are local to the chunk, expert indices to the rank. The last of several stages
    holds `output_layer.weight` also when the head is tied; with one stage a tied model has none. `head=False` leaves the output
    layer out (a critic has a value head in its place). Raises UserError where a size does not divide.
    """
    if model.moe is not None and model.moe.num_experts % parallel.ep:
        raise UserError(f"ep={parallel.ep} does not divide the {model.moe.num_experts} experts of the model")
    return McoreParty(model, parallel, tuple(range(first_rank, first_rank + world_size)), dtype, names, head)


def mcore_layout(model: ModelConfig, parallel: ParallelConfig, rank: int, world_size: int, dtype: torch.dtype,
                 names: Names = "local", head: bool = True) -> Layout:
    """What Megatron-Core's GPTModel holds on `rank` of a world of `world_size`: see `mcore_party`."""
    return mcore_party(model, parallel, world_size, dtype, names, head).layout(rank)


def _tensor(name: str, kind: str, ingredients: Ingredients, model: ModelConfig, tp: int, tp_rank: int, dtype: torch.dtype) -> LocalTensor:
    if kind == "qkv":
        rows = share(model.q_size + 2 * model.kv_size, tp, "rows of the fused query, key and value projection")
        return stacked(name, window(query_groups(ingredients, model), tp_rank * rows, (tp_rank + 1) * rows), ingredients[0][1][1:], dtype)
    if kind == "vocabulary":
        return vocabulary(name, ingredients, model.padded_vocab_size(tp) // tp, tp_rank, dtype)
    return cut(name, kind, ingredients, tp, tp_rank, dtype)  # type: ignore[arg-type]
