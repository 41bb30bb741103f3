"""An engine without a model: deterministic tokens, one a step for every sample. The calls of the protocol that a server makes."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from parallel.errors import UserError
from trtllm_rollout.protocol import Completion, EngineRefuses, Progress, Request


@dataclass
class _Sample:
    request: Request
    index: int
    ids: list[int] = field(default_factory=list)


class FakeEngine:
    """Token k of a sample is a letter or digit that depends on prompt, stream, sample and k. `may_step` cleared holds the next step back."""

    def __init__(self, tokenizer: Any, vocab: int, max_seq_len: int = 64) -> None:
        self.tokenizer, self.vocab, self.max_seq_len = tokenizer, vocab, max_seq_len
        self.version: int | None = 3
        self.may_step = threading.Event()
        self.may_step.set()
        self.running: list[_Sample] = []
        self.batches: list[int] = []  # samples in each step
        self.aborted: list[int] = []
        self.threads: set[int] = set()
        self.break_with: BaseException | None = None
        self._ended: list[Completion] = []

    def submit(self, requests: Sequence[Request]) -> None:
        for r in requests:
            if len(r.prompt_ids) + r.sampling.max_tokens > self.max_seq_len or not all(0 <= i < self.vocab for i in r.prompt_ids):
                raise UserError(f"request {r.request_id}: prompt id {max(r.prompt_ids)} is outside the vocabulary of {self.vocab}, or it is too long")
        self.running += [_Sample(r, k) for r in requests for k in range(r.samples)]

    def abort(self, request_ids: Iterable[int]) -> None:
        ids = set(request_ids)
        gone = [s for s in self.running if s.request.request_id in ids]
        self.aborted += sorted({s.request.request_id for s in gone})
        self._ended += [self._completion(s, "abort", None) for s in gone]
        self.running = [s for s in self.running if s.request.request_id not in ids]

    def begin_update(self) -> None:
        self.abort({s.request.request_id for s in self.running})
        self.version = None

    def commit(self, version: int) -> None:
        self.version = version

    def step(self) -> list[Completion | Progress]:
        self.may_step.wait(60)
        self.threads.add(threading.get_ident())
        out: list[Completion | Progress] = list(self._ended)
        self._ended = []
        if self.break_with is not None:
            raise self.break_with
        if self.running and self.version is None:
            self.running = []
            raise EngineRefuses("engine: a weights update is under way")
        if self.running:
            self.batches.append(len(self.running))
        for s in list(self.running):
            token = expected(s.request, s.index, len(s.ids), self.vocab)
            s.ids.append(token)
            if s.request.every_token:
                out.append(Progress(s.request.request_id, s.index, (token,), (log_prob(len(s.ids) - 1),)))
            if reason := self._reason(s):
                self.running.remove(s)
                out.append(self._completion(s, *reason))
        return out

    def _reason(self, s: _Sample) -> tuple[str, int | str | None] | None:
        sampling = s.request.sampling
        if len(s.ids) >= sampling.min_tokens:
            if s.ids[-1] in sampling.stop_token_ids:
                return "stop", s.ids[-1]
            text = self.tokenizer.decode(s.ids, skip_special_tokens=True)
            for stop in sampling.stop:
                if stop in text:
                    return "stop", stop
        return ("length", None) if len(s.ids) == sampling.max_tokens else None

    def _completion(self, s: _Sample, reason: str, stop: int | str | None) -> Completion:
        n, sampling = len(s.ids), s.request.sampling
        raw = tuple(log_prob(k) for k in range(n))
        top = tuple(tuple(((s.ids[k] + j) % self.vocab, raw[k] - j) for j in range(sampling.top_log_probs)) for k in range(n))
        return Completion(s.request.request_id, s.index, tuple(s.ids), tuple(v / 2 for v in raw), (self.version,) * n, reason, stop, raw, raw,
                          top if sampling.top_log_probs else (),
                          tuple(-9.0 - k for k in range(len(s.request.prompt_ids) - 1)) if sampling.prompt_log_probs else ())


def expected(request: Request, sample: int, k: int, vocab: int) -> int:
    """Token k of a sample: never one of the four special ids."""
    return 4 + zlib.crc32(repr((request.prompt_ids, request.stream, sample, k)).encode()) % (vocab - 4)


def log_prob(k: int) -> float:
    return -0.5 - 0.25 * k
