"""From hidden states to drawn tokens: the leader draws, the other tensor-parallel ranks hear of it in one broadcast."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from trtllm_rollout.embedded.attention import MIN_ROWS
from trtllm_rollout.embedded.decoder import Decoder, TensorParallel
from trtllm_rollout.embedded.penalties import changed_logits, changes_logits
from trtllm_rollout.embedded.sampling import Settings, full_log_probs, sample, top_log_probs
from trtllm_rollout.embedded.scheduler import Sample
from trtllm_rollout.embedded.sequences import KINDS, Sequences

LOGITS = 1 << 24  # held at a time


@dataclass(frozen=True)
class Draw:
    """A sample that draws its next token after `hidden` [hidden]; samples that begin share the tensor."""

    sample: Sample
    hidden: torch.Tensor


@dataclass(frozen=True)
class Drawn:
    """Ids [draws], log-probs [draws, 3], and by draw the most likely tokens where they are asked for."""

    ids: np.ndarray
    log_probs: np.ndarray
    top: dict[int, tuple[tuple[int, float], ...]] = field(default_factory=dict)


class Drawer:
    """Logits in slices, and tokens from them."""

    def __init__(self, decoder: Decoder, parallel: TensorParallel, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._decoder, self._parallel, self._device = decoder, parallel, device

    def draw(self, draws: Sequence[Draw], rows: np.ndarray, sequences: Sequences) -> Drawn:
        """One token for each of `draws`, whose settings are in `rows` of `sequences`."""
        wide = min(self._vocab_size, max(draw.sample.group.request.sampling.top_log_probs for draw in draws))
        drawn = torch.zeros(len(draws), 1 + KINDS + 2 * wide, dtype=torch.float64, device=self._device)
        for chosen, logits, row_of in self._slices(draws):
            if logits is not None:
                drawn[chosen] = self._leader(logits, row_of, [draws[i] for i in chosen], rows[chosen], sequences, wide)
        if self._parallel.size > 1:
            dist.broadcast(drawn, group=self._parallel.group, group_src=0)
        values = drawn.cpu().numpy()
        top = {}
        for i, draw in enumerate(draws):
            if count := draw.sample.group.request.sampling.top_log_probs:
                count = min(count, self._vocab_size)
                ids, scores = values[i, 1 + KINDS:][:count], values[i, 1 + KINDS + wide:][:count]
                top[i] = tuple(zip(ids.astype(np.int64).tolist(), scores.tolist(), strict=True))
        return Drawn(values[:, 0].astype(np.int64), values[:, 1:1 + KINDS], top)

    def prompt_log_probs(self, hidden: torch.Tensor, ids: Sequence[int]) -> list[float]:
        """Raw log-probs of `ids`, each after the row of `hidden` [ids, hidden] at the same place."""
        out = torch.zeros(len(ids), dtype=torch.float64, device=self._device)
        wanted = torch.tensor(ids, device=self._device)
        step = self._slice_rows()
        for start in range(0, len(ids), step):
            logits = self._logits(hidden[start:start + step])
            if logits is not None:
                out[start:start + step] = full_log_probs(logits, wanted[start:start + step])
        if self._parallel.size > 1:
            dist.broadcast(out, group=self._parallel.group, group_src=0)
        return out.tolist()

    def _leader(self, logits: torch.Tensor, row_of: list[int], draws: list[Draw], rows: np.ndarray, s: Sequences, wide: int) -> torch.Tensor:
        """What the leader draws [draws, 4 + 2 wide]: id, log-probs, the ids and the log-probs of the most likely tokens."""
        if row_of != list(range(len(logits))):
            logits = logits[torch.tensor(row_of, device=self._device)]
        settings = Settings(*(self._tensor(a[rows]) for a in (s.temperature, s.top_k, s.top_p, s.min_p)))
        changed = {}
        for i, draw in enumerate(draws):
            request = draw.sample.group.request
            if changes_logits(request.sampling, draw.sample.tokens):
                changed[i] = changed_logits(logits[i], request.sampling, request.prompt_ids, s.tokens[rows[i], :draw.sample.tokens].tolist())
        ids, log_probs = sample(logits, settings, self._tensor(s.next_uniforms(rows)), changed)
        columns = [ids[:, None].double(), log_probs]
        if wide:
            top = torch.zeros(len(draws), 2 * wide, dtype=torch.float64, device=self._device)
            some = torch.tensor([i for i, draw in enumerate(draws) if draw.sample.group.request.sampling.top_log_probs], device=self._device)
            count = min(wide, logits.shape[1])
            if len(some):
                top[some, :count], top[some, wide:wide + count] = (t.double() for t in top_log_probs(logits[some], count))
            columns.append(top)
        return torch.cat(columns, 1)

    def _slices(self, draws: Sequence[Draw]) -> Iterator[tuple[list[int], torch.Tensor | None, list[int]]]:
        """(draws, logits (leader) of the different hidden states among them, which of those each draws from), a slice at a time."""
        different = {id(draw.hidden): draw.hidden for draw in draws}
        order = {key: i for i, key in enumerate(different)}
        where = [order[id(draw.hidden)] for draw in draws]
        states, step = list(different.values()), self._slice_rows()
        for start in range(0, len(states), step):
            chosen = [i for i, place in enumerate(where) if start <= place < start + step]
            yield chosen, self._logits(torch.stack(states[start:start + step])), [where[i] - start for i in chosen]

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Logits [rows, vocab] on the leader; rows padded as everywhere (see `Generation._forward`)."""
        padding = max(0, MIN_ROWS * torch.get_num_threads() - len(hidden))
        logits = self._decoder.logits(torch.nn.functional.pad(hidden, (0, 0, 0, padding)))
        return None if logits is None else logits[:len(hidden)]

    def _slice_rows(self) -> int:
        return max(MIN_ROWS * torch.get_num_threads(), LOGITS // self._vocab_size)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
