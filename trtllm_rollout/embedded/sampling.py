"""Drawing tokens for a whole batch: counter-based random streams, inverse transform, vectorised top-k, top-p and min-p.

Everything here works row by row: a row's token depends on its logits, its settings and its own uniform number only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

BLOCK = 256
FIRST_CANDIDATES = 1024
SLICE = 1 << 20  # logits that are turned into fp32 at a time: a few megabytes, so that the passes over them stay in the cache


@dataclass(frozen=True)
class Settings:
    """How each row is drawn, all [rows]: `temperature` (0: greedy), `top_k` (0: all), `top_p` and `min_p`, float64 but for `top_k`."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    def __getitem__(self, rows: slice | torch.Tensor) -> Settings:
        return Settings(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])

    @property
    def cut(self) -> torch.Tensor:
        """Rows, [rows] bool, that may not draw every token."""
        return (self.temperature > 0) & ((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0))


def uniforms(stream: Sequence[int], sample: int, count: int) -> np.ndarray:
    """Uniform numbers in [0, 1), [count] float64, of one sample: number t belongs to its token t.

    Philox is counter-based (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), keyed here by a hash of
    (*stream, sample): a shorter draw is a prefix of a longer one. The words are prefixed by their number because
    SeedSequence pads with zeros, which would make (1, 0) and (1, 0, 0) one stream.
    """
    words = [len(stream) + 1, *stream, sample]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(words))).random(count)


def sample(logits: torch.Tensor, settings: Settings, uniform: torch.Tensor,
           changed: dict[int, torch.Tensor] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row. Returns (token ids [rows] int64, log-probs [rows, 3] float64: at the temperature, raw, as drawn).

    `logits` [rows, vocab] of real ids only; `uniform` [rows] float64 in [0, 1); `changed`: rows that draw from other logits [vocab]
    than theirs (penalties). The first two log-probs are always those of the full softmax of `logits` (see `Completion`).
    """
    step = max(1, SLICE // logits.shape[1])
    parts = []
    for start in range(0, len(logits), step):
        rows = slice(start, start + step)
        some = {row - start: new for row, new in (changed or {}).items() if start <= row < start + step}
        parts.append(_sample(logits[rows], settings[rows], uniform[rows], some))
    return torch.cat([ids for ids, _ in parts]), torch.cat([log_probs for _, log_probs in parts])


def _sample(logits: torch.Tensor, settings: Settings, uniform: torch.Tensor,
            changed: dict[int, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """`sample` of a few rows."""
    greedy = settings.temperature == 0
    scale = torch.where(greedy, 1.0, settings.temperature)
    raw = logits.float()
    heated = bool((scale != 1).any())
    given = raw / scale[:, None].float() if heated else raw
    drawn = given
    if changed:
        drawn = given.clone()
        for row, new in changed.items():
            drawn[row] = new / scale[row].float()
    probs = torch.softmax(drawn, -1)
    first = full_chances(drawn, probs)
    cut = torch.nonzero(settings.cut).flatten()
    ids = drawn.argmax(-1) if bool(greedy.any()) else None
    kept = torch.ones(len(drawn), dtype=torch.float64, device=drawn.device)
    if not bool(greedy.all()):
        if len(cut) == len(probs):
            probs = truncate(probs, settings.top_k, settings.top_p, settings.min_p)
        elif len(cut):
            probs[cut] = truncate(probs[cut], settings.top_k[cut], settings.top_p[cut], settings.min_p[cut])
        chosen, total = inverse_transform(probs, uniform)
        kept[cut] = total[cut]
        ids = chosen if ids is None else torch.where(greedy, ids, chosen)
    as_drawn = torch.where(greedy, 0.0, first(ids) - log(kept))
    at_temperature = first(ids) if not changed else full_log_probs(given, ids)
    return ids, torch.stack([at_temperature, full_log_probs(raw, ids) if heated else at_temperature, as_drawn], 1)


def full_chances(logits: torch.Tensor, probs: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """For `ids` [rows] their log-probs [rows] float64, given the softmax of `logits` [rows, vocab].

    From the logits and not from the id's own probability, which may be too small for fp32: the largest probability is 1 / sum of
    exp(logit - largest logit).
    """
    base = logits.amax(-1).double() - log(probs.amax(-1).double())
    return lambda ids: logits.gather(1, ids.view(len(logits), -1)).double().sub(base[:, None]).view(ids.shape)


def full_log_probs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probs [rows] float64 of `ids` under the softmax of `logits` [rows, vocab], a slice in fp32 at a time."""
    step = max(1, SLICE // logits.shape[1])
    parts = ((logits[i:i + step].float(), ids[i:i + step]) for i in range(0, len(logits), step))
    return torch.cat([full_chances(some, torch.softmax(some, -1))(wanted) for some, wanted in parts])


def log(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of a few float64 numbers [rows]. On the CPU one by one: torch's own gives the last of them by another function
    than the rest, and a row would depend on its place by a rounding."""
    return x.log() if x.device.type != "cpu" else torch.tensor([math.log(v) for v in x.tolist()], dtype=torch.float64)


def top_log_probs(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and raw log-probs (float64) of the `count` most likely tokens, each [rows, count], best first."""
    logits = logits.float()
    ids = logits.topk(count).indices
    return ids, full_chances(logits, torch.softmax(logits, -1))(ids)


def _blocks(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`weights` [rows, vocab] in blocks of 256 ids [rows, blocks, 256], and the sums of the blocks, float64."""
    blocks = F.pad(weights, (0, pad)) if (pad := -weights.shape[1] % BLOCK) else weights
    blocks = blocks.view(len(weights), -1, BLOCK)
    return blocks, blocks.sum(-1).double()


def inverse_transform(weights: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first id whose cumulative weight exceeds uniform x total, [rows], and the total; never an id of weight 0.

    Two levels, because a full cumulative sum over a large vocabulary costs more than the softmax: sums of blocks of 256
    ids choose the block, a cumulative sum inside it the id. Cumulative sums are float64.
    """
    blocks, sums = _blocks(weights)
    total = sums.sum(-1)
    target = uniform.double() * total
    block = _first_above(sums, target)
    inside = blocks[torch.arange(len(weights), device=weights.device), block].double()
    before = (sums.cumsum(-1) - sums).gather(1, block[:, None])[:, 0]
    return block * BLOCK + _first_above(inside, target - before), total


def _first_above(weights: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """First index whose cumulative sum exceeds target; rounding at the upper end falls back to the last positive weight."""
    cumulative = weights.cumsum(-1)
    index = (cumulative <= target[:, None]).sum(-1)
    positive = weights > 0
    last = weights.shape[-1] - 1 - positive.flip(-1).int().argmax(-1)
    first = positive.int().argmax(-1)
    return torch.maximum(torch.minimum(index, last), first)


def truncate(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor | None = None) -> torch.Tensor:
    """`probs` [rows, vocab] with everything outside top-k, then outside top-p of the remaining mass, then below `min_p` times the
    largest set to 0.

    Works on values, so the result does not depend on how ties are sorted: tied ids are kept lowest first.
    """
    vocab = probs.shape[1]
    k = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab)
    by_k = top_k > 0
    width = min(vocab, max(FIRST_CANDIDATES, int(k[by_k].max()) if bool(by_k.any()) else 0))
    values = probs.topk(width).values
    short = ~by_k & (top_p < 1) & (values.double().sum(-1) < top_p.double()) if width < vocab else torch.zeros_like(by_k)
    keep, threshold = _cut(values, k, top_p, torch.where(by_k, -1.0, 1.0))
    if bool(short.any()):
        rows = torch.nonzero(short).flatten()
        keep[rows], threshold[rows] = _cut(probs[rows].sort(-1, descending=True).values, k[rows], top_p[rows],
                                           torch.ones(len(rows), device=probs.device))
    whole = ~by_k & (top_p >= 1)  # nothing but min-p cuts here
    keep, threshold = torch.where(whole, vocab, keep), torch.where(whole, 0.0, threshold)
    kept = probs >= threshold[:, None]
    crowded = torch.nonzero(kept.sum(-1) > keep).flatten()
    if len(crowded):
        some, value = probs[crowded], threshold[crowded, None]
        above, ties = some > value, some == value
        room = (keep[crowded] - above.sum(-1))[:, None]
        kept[crowded] = above | (ties & (ties.cumsum(-1) <= room))
    if min_p is not None:
        kept &= probs >= (min_p.double() * values[:, 0].double()).float()[:, None]
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
