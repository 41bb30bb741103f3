"""Continuous batching: one step admits and computes new prompts, then gives every active sample one token.

Collectives of a step on tensor-parallel ranks: one sum for the embedding and two per layer, one gather of logits to the
leader, and one broadcast of the drawn tokens, which is why ranks cannot diverge.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from trtllm_rollout.embedded.decoder import MIN_ROWS, Decoder, TensorParallel
from trtllm_rollout.embedded.kv_cache import DecodeAttention, KVCache, PrefillAttention
from trtllm_rollout.embedded.sampling import sample
from trtllm_rollout.embedded.scheduler import Admission, Group, Scheduler
from trtllm_rollout.embedded.sequences import Sequences
from trtllm_rollout.protocol import Completion, EngineRefuses, Request


class Generation:
    """The unfinished work of an engine and the steps that advance it."""

    def __init__(self, decoder: Decoder, cache: KVCache, parallel: TensorParallel, device: torch.device,
                 max_batch_size: int, max_prefill_tokens: int) -> None:
        self._decoder, self._cache, self._parallel, self._device = decoder, cache, parallel, device
        self._max_batch_size = max_batch_size
        self._scheduler = Scheduler(max_batch_size, max_prefill_tokens)
        self._sequences = Sequences()
        self._prompt_logits: dict[Group, torch.Tensor] = {}  # leader only: prompts with samples that have no token yet
        self._room = (0, 0)
        self.counts = dict.fromkeys(("tokens", "prefill_tokens", "completions", "steps"), 0)

    @property
    def busy(self) -> bool:
        return self._scheduler.busy

    def load(self) -> dict[str, int]:
        """Samples in a slot now, and samples that wait for one."""
        groups = self._scheduler.groups()
        return {"running_samples": len(self._scheduler.running), "waiting_samples": sum(g.remaining for g in groups),
                "held_prompts": len(self._prompt_logits)}

    def request_ids(self) -> set[int]:
        """Ids of unfinished requests."""
        return {group.request.request_id for group in self._scheduler.groups()}

    def add(self, requests: Sequence[Request]) -> None:
        self._scheduler.add(requests)
        unfinished = [group.request for group in self._scheduler.groups()]
        slots = max(MIN_ROWS, min(self._max_batch_size, sum(r.samples for r in unfinished)))
        self._room = (slots, max((len(r.prompt_ids) + r.sampling.max_tokens for r in unfinished), default=0))
        self._sequences.reserve(slots, max((r.sampling.max_tokens for r in unfinished), default=0),
                                max((len(r.sampling.stop_token_ids) for r in unfinished), default=0))

    @torch.inference_mode()
    def abort(self, request_ids: Iterable[int] | None, version: int | None) -> list[Completion]:
        """End these requests (None: all); returns what they have so far."""
        slots, never = self._scheduler.cancel(self.request_ids() if request_ids is None else request_ids)
        ended = [self._completion(slot, "abort", version) for slot in slots]
        self._retire(slots)
        self._forget()
        self.counts["completions"] += len(never)
        return ended + [Completion(g.request.request_id, k, (), (), (), "abort") for g, k in never]

    @torch.inference_mode()
    def step(self, version: int) -> list[Completion]:
        """Advance all work by one token, made by weights `version`. Raises EngineRefuses where the weights give no numbers."""
        self.counts["steps"] += 1
        self._cache.reserve(*self._room, active=len(self._scheduler.running))
        finished = self._begin(self._scheduler.admit(), version)
        if active := len(self._scheduler.running):
            finished += self._append(np.arange(active), self._decode(active), version)
        return finished

    def _begin(self, admission: Admission, version: int) -> list[Completion]:
        """Compute new prompts and draw the first token of every sample that has none."""
        if admission.prefill:
            self._prefill(admission)
        copies = [s for s in admission.starts if s.source is not None]
        self._cache.copy([s.source for s in copies], [s.slot for s in copies],
                         max((len(s.group.request.prompt_ids) for s in copies), default=0))
        for start in admission.starts:
            self._sequences.assign(start.slot, start.group.request, start.sample)
        finished: list[Completion] = []
        while len(fresh := self._sequences.fresh(len(self._scheduler.running))):
            logits = None
            if self._parallel.rank == 0:
                logits = torch.stack([self._prompt_logits[self._scheduler.running[slot][0]] for slot in fresh])
            finished += self._append(fresh, logits, version)
        self._forget()
        return finished

    def _forget(self) -> None:
        """Drop the prompt logits that no sample will be drawn from any more."""
        drawn_from = {self._scheduler.running[slot][0] for slot in self._sequences.fresh(len(self._scheduler.running))}
        self._prompt_logits = {g: row for g, row in self._prompt_logits.items() if g.remaining or g in drawn_from}

    def _prefill(self, admission: Admission) -> None:
        prompts = [np.asarray(group.request.prompt_ids, np.int64) for group in admission.prefill]
        lengths = [len(p) for p in prompts]
        positions = np.concatenate([np.arange(n) for n in lengths])
        hidden = self._decoder.hidden(self._tensor(np.concatenate(prompts)), self._tensor(positions),
                                      PrefillAttention(self._cache, admission.first_slot, lengths))
        logits = self._decoder.logits(hidden[self._tensor(np.cumsum(lengths) - 1)])
        if logits is not None:
            self._prompt_logits.update(zip(admission.prefill, logits, strict=True))
        self.counts["prefill_tokens"] += len(positions)

    def _decode(self, active: int) -> torch.Tensor | None:
        """Logits [active, vocab] (leader) after the newest token of every active sample."""
        rows = max(active, MIN_ROWS)  # idle rows write to position 0 of free slots, which the next prompt there overwrites
        ids, cached = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        ids[:active], cached[:active] = self._sequences.last_tokens(active), self._sequences.cached(active)
        lengths = self._tensor(cached)
        logits = self._decoder.logits(self._decoder.hidden(self._tensor(ids), lengths, DecodeAttention(self._cache, lengths)))
        return None if logits is None else logits[:active]

    def _append(self, slots: np.ndarray, logits: torch.Tensor | None, version: int) -> list[Completion]:
        """Draw a token for each of `slots`, and retire those that are finished by it."""
        ids, log_probs = self._draw(slots, logits)
        if not np.isfinite(log_probs).all():
            self._cache.drop()  # it may hold NaN, which would outlive the weights that made it
            raise EngineRefuses(f"the logits of weights version {version} are not finite; check the last update, then "
                                "begin_update, write the weights and commit again")
        self.counts["tokens"] += len(slots)
        done, stopped = self._sequences.append(slots, ids, log_probs)
        finished = [self._completion(int(slot), "stop" if stop else "length", version)
                    for slot, stop in zip(done, stopped, strict=True)]
        self._retire(done.tolist())
        return finished

    def _draw(self, slots: np.ndarray, logits: torch.Tensor | None) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and log-probs [slots]; the leader draws, the others hear."""
        drawn = torch.empty(2, len(slots), dtype=torch.float64, device=self._device)
        if logits is not None:
            s = self._sequences
            uniform = s.uniforms[slots, s.generated[slots]] if s.uniforms.shape[1] else np.zeros(len(slots))
            drawn[0], drawn[1] = sample(logits, *(self._tensor(a) for a in (s.temperature[slots], s.top_k[slots], s.top_p[slots], uniform)))
        if self._parallel.size > 1:
            dist.broadcast(drawn, group=self._parallel.group, group_src=0)
        ids, log_probs = drawn.cpu().numpy()
        return ids.astype(np.int64), log_probs

    def _retire(self, slots: Sequence[int]) -> None:
        if not slots:
            return
        retirement = self._scheduler.retire(slots)
        for start in retirement.handovers:
            self._sequences.assign(start.slot, start.group.request, start.sample)
        if retirement.moves:
            sources, targets = zip(*retirement.moves, strict=True)
            if self._cache.slots:
                self._cache.copy(sources, targets, int(self._sequences.cached(max(sources) + 1)[list(sources)].max()))
            self._sequences.move(sources, targets)

    def _completion(self, slot: int, reason: str, version: int | None) -> Completion:
        group, k = self._scheduler.running[slot]
        count = int(self._sequences.generated[slot])
        self.counts["completions"] += 1
        return Completion(group.request.request_id, k, tuple(self._sequences.tokens[slot, :count].tolist()),
                          tuple(self._sequences.log_probs[slot, :count].tolist()), (version,) * count, reason)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
