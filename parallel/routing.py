"""Which experts a token goes to, as transformers' routers choose them."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel.model_config import MoE


def choose_experts(logits: Tensor, moe: MoE, correction_bias: Tensor | None = None, replay: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The experts of every token and their weights: logits [tokens, experts] -> (weights in fp32, indices), both [tokens, top_k].

    `replay` [tokens, top_k] is a choice that was made before, such as the engine's: it is kept, and only weighed anew. Tokens with -1 there
    choose for themselves.

    Sources: the routers in transformers' `modeling_deepseek_v2`, `modeling_deepseek_v3`, `modeling_qwen3_moe`, `modeling_gpt_oss`
    (a softmax over the chosen logits is the normalised choice of a softmax over all). A softmax router ranks a group of experts by
    its best one, a sigmoid router by the sum of its best two, correction bias included. Megatron's own group routing sums the
    best top_k // top_groups instead, which is another choice for most sizes.
    """
    scores = probabilities(logits, moe)
    indices = _choice(scores, moe, correction_bias)
    if replay is not None:
        indices = torch.where(replay >= 0, replay.to(indices.dtype), indices)
    weights = scores.gather(1, indices)
    if moe.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * moe.scaling, indices


def probabilities(logits: Tensor, moe: MoE) -> Tensor:
    """Scores of all experts, [tokens, experts] in fp32."""
    # in float64, for torch's float32 sigmoid gives the last few numbers of a tensor to another exp: a token's weights would depend on the others
    return logits.double().sigmoid().float() if moe.score == "sigmoid" else logits.float().softmax(-1)


def _choice(scores: Tensor, moe: MoE, correction_bias: Tensor | None) -> Tensor:
    ranking = scores if correction_bias is None else scores + correction_bias
    if moe.groups and moe.top_groups:
        grouped = ranking.view(len(ranking), moe.groups, -1)
        best = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1) if moe.score == "sigmoid" else grouped.max(-1).values
        kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, best.topk(moe.top_groups, -1).indices, True)
        ranking = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)
    return ranking.topk(moe.top_k, -1).indices
