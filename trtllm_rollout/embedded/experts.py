"""The feed-forward part of a layer: SwiGLU, alone or as routed and shared experts. Every part is this rank's of a sum over ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from parallel.model_config import ModelConfig, MoE
from parallel.routing import choose_experts
from trtllm_rollout.embedded.linear import LayerTensors, Linear, linear, silu

Note = Callable[[int, torch.Tensor], None]  # (which of the layers with experts, the choice [rows, top_k])
GATE_ALPHA = 1.702  # gpt_oss; families refuse another


@dataclass(frozen=True)
class SwiGLU:
    """down(silu(gate) * up), gate rows above up rows in one product."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: torch.Tensor, note: Note | None = None) -> torch.Tensor:
        """x [rows, hidden] -> [rows, hidden]."""
        gate, up = linear(x, self.gate_up).chunk(2, dim=-1)
        return linear(silu(gate).mul_(up), self.down)


@dataclass(frozen=True)
class Experts:
    """Experts [first, first + local) of the model, as far as this rank holds them; router and gate are whole on every rank.

    They are the model's `layer`-th layer with experts. `up_gate` [local, up rows above gate rows, hidden] and `down` [local, hidden, ffn] are stacked. `limit`: the clamp of gpt_oss.
    """

    moe: MoE
    layer: int
    first: int
    router: torch.Tensor
    router_bias: torch.Tensor | None
    correction_bias: torch.Tensor | None
    up_gate: Linear
    down: Linear
    limit: float | None
    shared: SwiGLU | None
    shared_gate: torch.Tensor | None

    def __call__(self, x: torch.Tensor, note: Note | None = None) -> torch.Tensor:
        """x [rows, hidden] -> [rows, hidden]. `note` is told of the experts that were chosen."""
        out = self._routed(x, note)
        if self.shared is None:
            return out
        shared = self.shared(x)
        if self.shared_gate is not None:  # as a sum and not a product of matrices: a matrix of one row has kernels that mix up rows
            shared *= (x.float() * self.shared_gate.float()).sum(-1, keepdim=True).double().sigmoid().to(x.dtype)
        return out.add_(shared)

    def _routed(self, x: torch.Tensor, note: Note | None) -> torch.Tensor:
        """Rows are sorted by expert, each expert that is used multiplies its own, and every row adds up its results in its own order.

        Routers compute in fp32 whatever the model's type, as the trainer's do.
        """
        bias = None if self.router_bias is None else self.router_bias.float()
        weights, indices = choose_experts(linear(x.float(), Linear(self.router.float(), bias=bias)), self.moe, self.correction_bias)
        if note is not None:
            note(self.layer, indices)
        local = len(self.up_gate.weight)
        mine = (indices - self.first).flatten()
        mine = torch.where((mine >= 0) & (mine < local), mine, local)  # other ranks' experts go to the end
        order = mine.argsort(stable=True)
        counts = mine.bincount(minlength=local + 1)[:local].tolist()
        order = order[:sum(counts)]
        rows = x[order.div(self.moe.top_k, rounding_mode="floor")]
        results = x.new_zeros(len(mine), x.shape[1])
        results[order] = torch.cat([self._expert(part, i) for i, part in enumerate(rows.split(counts)) if len(part)] or [rows])
        return (results.view(len(x), self.moe.top_k, -1) * weights[..., None]).sum(1).to(x.dtype)

    def _expert(self, x: torch.Tensor, index: int) -> torch.Tensor:
        up, gate = linear(x, self.up_gate.of(index)).chunk(2, dim=-1)
        if self.limit is None:
            return linear(silu(gate).mul_(up), self.down.of(index))
        gated = silu(gate.clamp_(max=self.limit).mul_(GATE_ALPHA)).mul_(1 / GATE_ALPHA)  # gate * sigmoid(alpha * gate)
        return linear(gated.mul_(up.clamp_(-self.limit, self.limit).add_(1)), self.down.of(index))


def feed_forward(model: ModelConfig, layer: LayerTensors, index: int, tp_rank: int, moe_ep: int) -> SwiGLU | Experts:
    """The feed-forward part of decoder layer `index`. Rank `tp_rank` holds the experts of ep rank `tp_rank % moe_ep`."""
    if model.moe is None or index not in model.moe_layers:
        return _swiglu(layer, "mlp")
    block = layer.first("mlp.experts.w3_w1_weight", "block_sparse_moe.experts.w3_w1_weight").split(".")[0]
    router = layer.first(f"{block}.gate.weight", f"{block}.router.weight").removesuffix(".weight")
    shared = [f"{block}.{name}" for name in ("shared_experts", "shared_expert") if f"{block}.{name}.down_proj.weight" in layer]
    return Experts(
        model.moe, sorted(model.moe_layers).index(index), tp_rank % moe_ep * (model.moe.num_experts // moe_ep), layer[router + ".weight"], layer.get(router + ".bias"),
        layer.get(router + ".e_score_correction_bias"), layer.linear(f"{block}.experts.w3_w1", "_"),
        layer.linear(f"{block}.experts.w2", "_", bias=tp_rank // moe_ep == 0),  # whole on every rank that cuts the expert: added by one
        model.swiglu_limit, _swiglu(layer, shared[0]) if shared else None, layer.get(f"{block}.shared_expert_gate.weight"))


def _swiglu(layer: LayerTensors, name: str) -> SwiGLU:
    return SwiGLU(layer.linear(f"{name}.gate_up_proj"), layer.linear(f"{name}.down_proj"))
