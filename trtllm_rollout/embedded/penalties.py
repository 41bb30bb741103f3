"""What changes logits before a token is drawn: penalties on tokens already there, and stop tokens that may not come yet."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trtllm_rollout.protocol import SamplingParams


def changes_logits(sampling: SamplingParams, generated: int) -> bool:
    """Whether the next token after `generated` ones is drawn from other logits than the model's."""
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or (generated < sampling.min_tokens and bool(sampling.stop_token_ids))


def changed_logits(logits: torch.Tensor, sampling: SamplingParams, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """`logits` [vocab] as they are drawn from, fp32, a new tensor.

    Repetition penalty (Keskar et al., arXiv:1909.05858, 4.1; transformers `RepetitionPenaltyLogitsProcessor`): logits of tokens in
    prompt or answer are divided by it where positive, else multiplied. Presence penalty (OpenAI, vLLM): subtracted once from tokens
    in the answer. `min_tokens` (vLLM): no stop id before the answer has so many tokens.
    """
    out = logits.float().clone()
    vocab = len(out)
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted({*prompt, *answer}), device=out.device)
        values = out[seen]
        out[seen] = torch.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
    if sampling.presence_penalty and answer:
        out[torch.tensor(sorted(set(answer)), device=out.device)] -= sampling.presence_penalty
    if len(answer) < sampling.min_tokens:
        stops = [token for token in sampling.stop_token_ids if token < vocab]
        if len(stops) < vocab and stops:
            out[torch.tensor(stops, device=out.device)] = -torch.inf
    return out
