"""Drawing tokens for a whole batch: counter-based random streams, inverse transform, vectorised top-k and top-p.

Everything here works row by row: a row's token depends on its logits, its settings and its own uniform number only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

BLOCK = 256
FIRST_CANDIDATES = 1024


def uniforms(stream: Sequence[int], sample: int, count: int) -> np.ndarray:
    """Uniform numbers in [0, 1), [count] float64, of one sample: number t belongs to its token t.

    Philox is counter-based (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), keyed here by a hash of
    (*stream, sample): a shorter draw is a prefix of a longer one. The words are prefixed by their number because
    SeedSequence pads with zeros, which would make (1, 0) and (1, 0, 0) one stream.
    """
    words = [len(stream) + 1, *stream, sample]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(words))).random(count)


def sample(logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor,
           uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row. Returns (token ids [rows] int64, log-probs [rows] float64).

    `logits` [rows, vocab] of real ids only; `temperature` [rows] (0: greedy), `top_k` [rows] (0: all), `top_p` [rows],
    `uniform` [rows] float64 in [0, 1). Log-probs are those of the full softmax at the temperature (1 where greedy).
    """
    greedy = temperature == 0
    scale = torch.where(greedy, 1.0, temperature)
    logits = logits.float()
    probs = torch.softmax(logits if bool((scale == 1).all()) else logits / scale[:, None].float(), dim=-1)
    weights = probs
    cut = torch.nonzero(~greedy & ((top_k > 0) | (top_p < 1))).flatten()
    if len(cut) == len(probs):
        weights = truncate(probs, top_k, top_p)
    elif len(cut):
        weights = probs.clone()
        weights[cut] = truncate(probs[cut], top_k[cut], top_p[cut])
    if bool(greedy.all()):
        ids = logits.argmax(-1)
    else:
        ids = inverse_transform(weights, uniform)
        if bool(greedy.any()):
            ids = torch.where(greedy, logits.argmax(-1), ids)
    return ids, probs.gather(1, ids[:, None])[:, 0].double().log()


def inverse_transform(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first id whose cumulative weight exceeds uniform x total, [rows]; never an id of weight 0.

    Two levels, because a full cumulative sum over a large vocabulary costs more than the softmax: sums of blocks of 256
    ids choose the block, a cumulative sum inside it the id. Cumulative sums are float64.
    """
    rows, vocab = weights.shape
    blocks = F.pad(weights, (0, -vocab % BLOCK)).view(rows, -1, BLOCK)
    sums = blocks.sum(-1).double()
    target = uniform.double() * sums.sum(-1)
    block = _first_above(sums, target)
    inside = blocks[torch.arange(rows, device=weights.device), block].double()
    before = (sums.cumsum(-1) - sums).gather(1, block[:, None])[:, 0]
    return block * BLOCK + _first_above(inside, target - before)


def _first_above(weights: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """First index whose cumulative sum exceeds target; rounding at the upper end falls back to the last positive weight."""
    cumulative = weights.cumsum(-1)
    index = (cumulative <= target[:, None]).sum(-1)
    positive = weights > 0
    last = weights.shape[-1] - 1 - positive.flip(-1).int().argmax(-1)
    first = positive.int().argmax(-1)
    return torch.maximum(torch.minimum(index, last), first)


def truncate(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """`probs` [rows, vocab] with everything outside top-k, then outside top-p of the remaining mass, set to 0.

    Works on values, so the result does not depend on how ties are sorted: tied ids are kept lowest first.
    """
    vocab = probs.shape[1]
    k = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab)
    by_k = top_k > 0
    width = min(vocab, max(FIRST_CANDIDATES, int(k[by_k].max()) if bool(by_k.any()) else 0))
    values = probs.topk(width).values
    short = ~by_k & (values.double().sum(-1) < top_p.double()) if width < vocab else torch.zeros_like(by_k)
    keep, threshold = _cut(values, k, top_p, torch.where(by_k, -1.0, 1.0))
    if bool(short.any()):
        rows = torch.nonzero(short).flatten()
        keep[rows], threshold[rows] = _cut(probs[rows].sort(-1, descending=True).values, k[rows], top_p[rows], torch.ones(len(rows)))
    kept = probs >= threshold[:, None]
    crowded = torch.nonzero(kept.sum(-1) > keep).flatten()
    if len(crowded):
        some, value = probs[crowded], threshold[crowded, None]
        above, ties = some > value, some == value
        room = (keep[crowded] - above.sum(-1))[:, None]
        kept[crowded] = above | (ties & (ties.cumsum(-1) <= room))
    return torch.where(kept, probs, 0.0)


def _cut(values: torch.Tensor, k: torch.Tensor, top_p: torch.Tensor, mass: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of the descending `values` to keep, and the smallest kept value. `mass` is the total, or -1: the first k's."""
    inside = torch.arange(values.shape[1], device=values.device) < k[:, None]
    cumulative = torch.where(inside, values.double(), 0.0).cumsum(-1)
    total = torch.where(mass.to(values.device) < 0, cumulative[:, -1], 1.0)
    reached = (cumulative < (top_p.double() * total)[:, None]) & inside
    keep = torch.where(top_p < 1, reached.sum(-1) + 1, k)
    keep = torch.minimum(keep, k).clamp(max=values.shape[1])
    return keep, values.gather(1, keep[:, None] - 1)[:, 0]
