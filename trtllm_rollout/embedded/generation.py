"""Continuous batching: one step computes a piece of waiting prompts and one new token for every running sample.

Collectives of a step on tensor-parallel ranks: those of the decoder, one gather of logits to the leader for every slice of them, and
one broadcast of what was drawn, which is why ranks cannot diverge: what is computed follows from that and from what was submitted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from trtllm_rollout.embedded.attention import MIN_ROWS, PromptPart, Row, StepAttention
from trtllm_rollout.embedded.backends import choose_all
from trtllm_rollout.embedded.decoder import Decoder, TensorParallel
from trtllm_rollout.embedded.drawing import Draw, Drawer, Drawn
from trtllm_rollout.embedded.kv_cache import KVCache
from trtllm_rollout.embedded.scheduler import Group, Plan, Sample, Scheduler
from trtllm_rollout.embedded.sequences import Sequences
from trtllm_rollout.embedded.stop_strings import met_stop
from trtllm_rollout.protocol import Completion, EngineRefuses, Progress, Request, Timing

COUNTS = ("tokens", "prefill_tokens", "recomputed_tokens", "completions", "steps", "batch_samples")
PHASES = ("prefill", "decode", "sampling", "other")


class Generation:
    """The unfinished work of an engine and the steps that advance it."""

    def __init__(self, decoder: Decoder, cache: KVCache, scheduler: Scheduler, parallel: TensorParallel, vocab_size: int, device: torch.device,
                 detokenize: Callable[[Sequence[int]], str] | None) -> None:
        self._decoder, self._cache, self._scheduler, self._device, self._detokenize = decoder, cache, scheduler, device, detokenize
        self._backends = choose_all(decoder.heads, device)
        self._drawer = Drawer(decoder, parallel, vocab_size, device)
        self._sequences = Sequences()
        self._rows: dict[Sample, int] = {}
        self._after: dict[Group, torch.Tensor] = {}  # the hidden state [hidden] after a prompt that samples have yet to begin from
        self._prompt_log_probs: dict[Group, list[float]] = {}
        self._submitted: dict[Group, float] = {}
        self._times: dict[Sample, tuple[float, float]] = {}  # first computation of its prompt, first token
        self._begun: dict[Group, float] = {}
        self.reset_counts()

    @property
    def busy(self) -> bool:
        return self._scheduler.busy

    def reset_counts(self) -> None:
        self.counts = dict.fromkeys(COUNTS, 0)
        self.phases = dict.fromkeys(PHASES, 0.0)
        self.waits = {"queued": 0.0, "first_token": 0.0, "total": 0.0, "longest": 0.0}
        self._scheduler.preemptions = 0

    def load(self) -> dict[str, float]:
        """What runs, waits and is held now."""
        pool = self._scheduler.pool
        return {"running_samples": self._scheduler.running, "waiting_samples": sum(g.waiting for g in self._scheduler.groups),
                "held_prompts": len(self._after), "kv_blocks_used": pool.used, "kv_blocks_most": pool.most, "kv_blocks_total": pool.count,
                "prefix_hit_rate": pool.found / pool.looked_up if pool.looked_up else 0.0, "preemptions": self._scheduler.preemptions}

    def request_ids(self) -> set[int]:
        """Ids of unfinished requests."""
        return {group.request.request_id for group in self._scheduler.groups}

    def add(self, requests: Sequence[Request]) -> None:
        now = time.perf_counter()
        for group in self._scheduler.add(requests):
            self._submitted[group] = now

    def abort(self, request_ids: Iterable[int] | None, version: int | None) -> list[Completion]:
        """End these requests (None: all); returns what they have so far."""
        started, never = self._scheduler.cancel(self.request_ids() if request_ids is None else request_ids)
        ended = [self._finish(sample, "abort", None, version) for sample in started]
        for group, k in never:
            self.counts["completions"] += 1
            ended.append(Completion(group.request.request_id, k, (), (), (), "abort"))
        self._forget()
        return ended

    def reset_cache(self) -> None:
        """Forget cached prompts: their weights are gone."""
        self._scheduler.reset_cache()

    @torch.inference_mode()
    def step(self, version: int) -> list[Completion | Progress]:
        """Advance all work by one token, made by weights `version`. Raises EngineRefuses where the weights give no numbers."""
        began = time.perf_counter()
        measured = sum(self.phases.values())
        self.counts["steps"] += 1
        self._cache.ensure()
        plan = self._scheduler.plan()
        self.counts["batch_samples"] += self._scheduler.running
        draws = self._compute(plan, began)
        done: list[Completion | Progress] = self._record(draws, version) if draws else []
        self._forget()
        self.phases["other"] += time.perf_counter() - began - (sum(self.phases.values()) - measured)
        return done

    def _compute(self, plan: Plan, now: float) -> list[Draw]:
        """Run the decoder over the plan's tokens. Returns from what each sample draws."""
        ids, positions, rows = self._tokens(plan)
        draws: list[Draw] = []
        hidden = None
        if ids:
            started = time.perf_counter()
            hidden = self._forward(plan, ids, positions, rows)
            prompts = sum(chunk.stop - chunk.start for chunk in plan.chunks)
            seconds = time.perf_counter() - started
            self.phases["prefill"] += seconds * prompts / len(ids)
            self.phases["decode"] += seconds * (1 - prompts / len(ids))
            self.counts["prefill_tokens"] += prompts
            self.counts["recomputed_tokens"] += len(ids) - prompts - len(plan.runs)
            self._keep_prompts(plan, hidden, now)
            row = prompts - 1
            for run in plan.runs:
                row += run.stop - run.start
                if run.stop == run.sample.tokens:
                    draws.append(Draw(run.sample, hidden[row]))
        for sample in plan.starts:
            self._rows[sample] = self._sequences.take(sample.group.request, sample.index)
            draws.append(Draw(sample, self._after[sample.group]))
        return draws

    def _tokens(self, plan: Plan) -> tuple[list[int], list[int], list[Row]]:
        """Ids and positions of all rows, prompts first, and what the samples' rows see."""
        ids: list[int] = []
        positions: list[int] = []
        rows: list[Row] = []
        for chunk in plan.chunks:
            ids += chunk.group.request.prompt_ids[chunk.start:chunk.stop]
            positions += range(chunk.start, chunk.stop)
        for run in plan.runs:
            group, prompt = run.sample.group, len(run.sample.group.request.prompt_ids)
            ids += self._sequences.tokens[self._rows[run.sample], run.start:run.stop].tolist()
            positions += range(prompt + run.start, prompt + run.stop)
            rows += [Row(prompt + at, prompt, group.blocks, run.sample.blocks) for at in range(run.start, run.stop)]
        return ids, positions, rows

    def _forward(self, plan: Plan, ids: list[int], positions: list[int], rows: list[Row]) -> torch.Tensor:
        """Hidden states [rows, hidden] of all tokens. So many rows at least that no thread's share of a product has fewer than 4."""
        padding = max(0, MIN_ROWS * torch.get_num_threads() - len(ids))
        prompts = [PromptPart(c.start, c.stop, c.group.blocks[:-(-c.stop // self._cache.block_size)]) for c in plan.chunks]
        attention = StepAttention(self._cache, self._decoder.heads, self._backends, prompts, rows, padding, self._device)
        return self._decoder.hidden(torch.tensor(ids + padding * [0], device=self._device),
                                    torch.tensor(positions + padding * [0], device=self._device), attention, attention.note_experts)

    def _keep_prompts(self, plan: Plan, hidden: torch.Tensor, now: float) -> None:
        """What samples begin from, and the prompts' own log-probs where they are asked for."""
        row = 0
        for chunk in plan.chunks:
            request = chunk.group.request
            self._begun.setdefault(chunk.group, now)
            if request.sampling.prompt_log_probs:
                known = self._prompt_log_probs.setdefault(chunk.group, [])  # a prompt that was put back comes a second time
                first, last = max(chunk.start, len(known)), min(chunk.stop, len(request.prompt_ids) - 1)  # the last token predicts the answer
                if first < last:
                    known += self._drawer.prompt_log_probs(hidden[row + first - chunk.start:row + last - chunk.start],
                                                           request.prompt_ids[first + 1:last + 1])
            row += chunk.stop - chunk.start
            if chunk.stop == len(request.prompt_ids):
                self._after[chunk.group] = hidden[row - 1].clone()

    def _record(self, draws: Sequence[Draw], version: int) -> list[Completion | Progress]:
        """Draw, note the tokens, and end the samples that are finished by them."""
        started = time.perf_counter()
        rows = np.array([self._rows[draw.sample] for draw in draws])
        drawn = self._drawer.draw(draws, rows, self._sequences)
        self.phases["sampling"] += time.perf_counter() - started
        if not np.isfinite(drawn.log_probs).all():
            self._cache.drop()  # it may hold NaN, which would outlive the weights that made it
            self.reset_cache()
            raise EngineRefuses(f"the logits of weights version {version} are not finite; check the last update, then "
                                "begin_update, write the weights and commit again")
        self.counts["tokens"] += len(rows)
        stopped, full = self._sequences.append(rows, drawn.ids, drawn.log_probs)
        return self._report(draws, rows, drawn, stopped, full, version)

    def _report(self, draws: Sequence[Draw], rows: np.ndarray, drawn: Drawn, stopped: np.ndarray, full: np.ndarray,
                version: int) -> list[Completion | Progress]:
        now = time.perf_counter()
        done: list[Completion | Progress] = []
        for i, draw in enumerate(draws):
            sample, request = draw.sample, draw.sample.group.request
            self._scheduler.drawn(sample)
            if sample.tokens == 1:
                self._times[sample] = (self._begun.get(sample.group, now), now)
            if i in drawn.top:
                self._sequences.top[int(rows[i])].append(drawn.top[i])
            reason: int | str | None = int(drawn.ids[i]) if stopped[i] else None
            if reason is None and request.sampling.stop and self._detokenize is not None and sample.tokens >= request.sampling.min_tokens:
                reason = met_stop(self._sequences.tokens[rows[i], :sample.tokens].tolist(), request.sampling.stop, self._detokenize)
            if request.every_token:
                done.append(self._progress(sample))
            if reason is not None or full[i]:
                done.append(self._finish(sample, "length" if reason is None else "stop", reason, version))
        return done

    def _progress(self, sample: Sample) -> Progress:
        row = self._rows[sample]
        new = slice(int(self._sequences.reported[row]), sample.tokens)
        self._sequences.reported[row] = sample.tokens
        return Progress(sample.group.request.request_id, sample.index, tuple(self._sequences.tokens[row, new].tolist()),
                        tuple(self._sequences.log_probs[row, new, 0].tolist()))

    def _finish(self, sample: Sample, reason: str, stop_reason: int | str | None, version: int | None) -> Completion:
        row, count, s, group = self._rows.pop(sample), sample.tokens, self._sequences, sample.group
        log_probs, raw, as_drawn = (tuple(column.tolist()) for column in s.log_probs[row, :count].T)
        completion = Completion(group.request.request_id, sample.index, tuple(s.tokens[row, :count].tolist()), log_probs, (version,) * count, reason,
                                stop_reason, raw, as_drawn, tuple(s.top[row]), tuple(self._prompt_log_probs.get(group, ())), self._choices(sample), self._timing(sample))
        s.give_back(row)
        self._scheduler.finish(sample)
        self.counts["completions"] += 1
        return completion

    def _choices(self, sample: Sample) -> torch.Tensor | None:
        """The experts of all computed tokens, prompt first; none of a sample that was put back."""
        if self._cache.experts is None:
            return None
        if not sample.cached and sample.tokens > 1:
            return self._cache.choices([], 0)
        prompt = self._cache.choices(sample.group.blocks, sample.group.computed)
        return torch.cat([prompt, self._cache.choices(sample.blocks, sample.cached)])

    def _timing(self, sample: Sample) -> Timing:
        submitted, now = self._submitted[sample.group], time.perf_counter()
        begun, first = self._times.pop(sample, (now, now))
        timing = Timing(max(0.0, begun - submitted), first - submitted, now - submitted, sample.preemptions)
        for name in ("queued", "first_token", "total"):
            self.waits[name] += getattr(timing, name)
        self.waits["longest"] = max(self.waits["longest"], timing.total)
        return timing

    def _forget(self) -> None:
        """Drop what belongs to requests that are done, and prompts that no sample will begin from any more."""
        unfinished = set(self._scheduler.groups)
        self._after = {g: hidden for g, hidden in self._after.items() if g in unfinished and g.remaining and g.ready}
        for notes in (self._submitted, self._begun, self._prompt_log_probs):
            for group in [g for g in notes if g not in unfinished]:
                del notes[group]
