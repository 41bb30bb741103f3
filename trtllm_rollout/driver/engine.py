"""The TensorRT-LLM engine: the engine protocol on top of an owner, the same on every rank of a replica."""

from __future__ import annotations

import itertools
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from parallel.errors import UserError
from parallel.model_config import ModelConfig
from resharding.checksum import verify
from resharding.errors import WeightsError
from resharding.layout import Layout
from trtllm_rollout.checks import RankState, asleep, check_prompt, check_tags, disagreement
from trtllm_rollout.driver.agreed import Ranks
from trtllm_rollout.driver.outputs import completion, look_up
from trtllm_rollout.driver.owner import Owner
from trtllm_rollout.driver.sampling import CPP, Dialect, translate
from trtllm_rollout.driver.serving import Event, Key
from trtllm_rollout.protocol import Completion, EngineRefuses, Progress, Request, Timing


@dataclass
class _Work:
    """One sample under way. On the first rank: `key` in TensorRT-LLM once it was sent, moment of the `first` token, tokens `told` so far."""

    request: Request
    sample: int
    submitted: float
    key: Key | None = None
    first: float | None = None
    told: int = 0


class TensorRTEngine:
    """See `trtllm_rollout.protocol.Engine`. Requests, their order and every answer are those of the replica's first rank."""

    def __init__(self, model: ModelConfig, owner: Owner, ranks: Ranks, dialect: Dialect, max_seq_len: int) -> None:
        self.order = owner.order  # see owner.Owner
        self._model, self._owner, self._ranks, self._dialect, self._max_seq_len = model, owner, ranks, dialect, max_seq_len
        self._work: dict[tuple[int, int], _Work] = {}  # by request and sample, in the order in which they are served
        self._sent: dict[Key, _Work] = {}
        self._keys = itertools.count()
        self._finished: deque[Completion | Progress] = deque()
        self._version: int | None = None
        self._checksums: Mapping[str, int] | None = None
        self._verified = False
        self._refusal = "no weights version is committed; write weights() and call commit"
        self._asleep: set[str] = set()
        self._submitted = 0  # running hash of all submitted requests, compared between ranks
        self._tokens = 0
        self._seconds = self._checksum_seconds = 0.0

    @property
    def version(self) -> int | None:
        return self._version

    @property
    def layouts(self) -> list[Layout]:
        return self._owner.layouts

    # weights

    def weights(self) -> dict[str, torch.Tensor]:
        """What the plan writes into, for the time of an update: with owner ray its memory is given back at `commit`."""
        if "weights" in self._asleep:
            raise EngineRefuses("engine: its weights are asleep; wake(['weights']) first")
        return self._owner.weights()

    def begin_update(self) -> None:
        try:
            self._drain()
        finally:
            self._version, self._checksums, self._verified = None, None, False
            self._refusal = "a weights update is under way; commit it first"
        if "weights" not in self._asleep:
            self._owner.begin_update()

    def commit(self, version: int, checksums: Mapping[str, int] | None = None) -> None:
        """Hand the weights to TensorRT-LLM. Raises EngineRefuses, UserError or WeightsError on every rank; the engine then keeps refusing."""
        if "weights" in self._asleep:
            raise EngineRefuses(f"engine: cannot commit version {version}: its weights are asleep; wake them and write them first")
        if self._version is not None:
            raise EngineRefuses(f"engine: commit of version {version} without begin_update; version {self._version} is committed")
        self._owner.hand_over()
        self._version, self._checksums, self._verified, self._refusal = version, checksums, False, ""
        self._tokens, self._seconds, self._checksum_seconds = 0, 0.0, 0.0

    def verify(self) -> None:
        """Compare what the engine holds with the committed checksums, on all ranks. Raises WeightsError; the engine then refuses."""
        try:
            if not self._verified:
                self._verify()
        except EngineRefuses as error:
            raise WeightsError(str(error)) from None

    def _verify(self) -> None:
        start = time.perf_counter()
        values = self._ranks.gather(self._owner.read_back())
        try:
            verify(self.layouts, values, self._checksums)
        except WeightsError as error:
            self._refuse(f"weights version {self._version} are not what was committed: {error}")
        finally:
            self._checksum_seconds += time.perf_counter() - start
        self._verified = True

    # generation

    def submit(self, requests: Sequence[Request]) -> None:
        known = {request_id for request_id, _ in self._work}
        for request in requests:
            check_prompt(request, self._model, self._max_seq_len)
            translate(request, 0, self._dialect)  # refuses what this sampler cannot do
            if request.request_id in known:
                raise UserError(f"request {request.request_id}: an unfinished request has this id already; ids must differ")
            known.add(request.request_id)
        self._submitted = zlib.crc32(repr(list(requests)).encode(), self._submitted)
        now = time.perf_counter()
        for request in sorted(requests, key=lambda r: r.priority):  # TensorRT-LLM serves in order of arrival
            for sample in range(request.samples):
                self._work[request.request_id, sample] = _Work(request, sample, now)

    def stream(self) -> Iterator[Completion]:
        self._ready()
        while self._finished or self._work:
            while self._finished:
                one = self._finished.popleft()
                if isinstance(one, Completion):
                    yield one
            if self._work:
                self._advance()

    def step(self) -> list[Completion | Progress]:
        self._ready()
        if not self._finished and self._work:
            self._advance()
        out = list(self._finished)
        self._finished.clear()
        return out

    def abort(self, request_ids: Iterable[int]) -> None:
        ids = set(request_ids)
        keys = [key for key in self._work if key[0] in ids]
        self._finished += self._never_sent(keys)
        if self._ranks.leads:
            self._owner.abort([work.key for key in keys if (work := self._work.get(key)) and work.key is not None])

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        if self._work or self._finished:
            raise EngineRefuses("engine: generate while submitted work is unfinished; read stream() to its end first")
        order = {request.request_id: i for i, request in enumerate(requests)}
        self.submit(requests)
        return sorted(self.stream(), key=lambda c: (order[c.request_id], c.sample))

    def _advance(self) -> None:
        """Send what is new and wait for news of any sample; a refusal ends all of it."""
        if self._version is None or not self._verified:
            self._ready()
        start = time.perf_counter()
        try:
            news = self._ranks.first(self._serve)
        except EngineRefuses as error:
            self._abandon()
            self._refuse(str(error).removeprefix("engine: "))
        finally:
            self._seconds += time.perf_counter() - start
        self._take(news)

    def _serve(self) -> list[Completion | Progress]:
        """First rank."""
        self._serve_new()
        return [one for event in self._owner.news() for one in self._told(event)]

    def _serve_new(self) -> None:
        for work in self._work.values():
            if work.key is None:
                work.key = next(self._keys)
                self._sent[work.key] = work
                self._owner.submit(work.key, work.request.prompt_ids, translate(work.request, work.sample, self._dialect), work.request.every_token)

    def _told(self, event: Event) -> Iterator[Completion | Progress]:
        work, version = self._sent.get(event.key), self._version
        if work is None:  # of work that was abandoned
            return
        if event.error is not None or event.output is None:
            raise EngineRefuses(f"request {work.request.request_id}, sample {work.sample}: TensorRT-LLM failed: {event.error}")
        work.first = work.first or event.at
        out, request = event.output, work.request
        if event.finished:
            timing = Timing(0.0, work.first - work.submitted, event.at - work.submitted)
            done = completion(request, work.sample, out, self._dialect, -1 if version is None else version, timing)
            del self._sent[event.key]
            yield from self._progress(work, done.token_ids, done.log_probs)
            yield done
        elif self._dialect.sampler == CPP or not self._dialect.from_logits:
            tokens = out.token_ids
            stop = next((i for i, t in enumerate(tokens) if t in request.sampling.stop_token_ids), None)
            tokens = tokens if stop is None else tokens[:stop + 1]
            yield from self._progress(work, tokens, look_up(f"request {request.request_id}", tokens, out.log_probs))

    def _progress(self, work: _Work, tokens: tuple[int, ...], log_probs: tuple[float, ...]) -> Iterator[Progress]:
        if work.request.every_token and len(tokens) > work.told:
            yield Progress(work.request.request_id, work.sample, tokens[work.told:], log_probs[work.told:])
            work.told = len(tokens)

    def _take(self, news: Sequence[Completion | Progress]) -> None:
        for one in news:
            if isinstance(one, Completion):
                self._work.pop((one.request_id, one.sample), None)
                self._tokens += len(one.token_ids)
            self._finished.append(one)

    def _never_sent(self, keys: Iterable[tuple[int, int]]) -> list[Completion]:
        """End samples that TensorRT-LLM has not heard of; which those are, the first rank knows."""
        unsent = self._ranks.first(lambda: [key for key in keys if self._work[key].key is None])
        for key in unsent:
            del self._work[key]
        return [Completion(request_id, sample, (), (), (), "abort") for request_id, sample in unsent]

    def _drain(self) -> None:
        """End all work as "abort" and wait until TensorRT-LLM has nothing under way: an update waits for that."""
        self._finished += self._never_sent(list(self._work))
        if self._ranks.leads:
            self._owner.abort(list(self._sent))
        try:
            while self._work:
                self._take(self._ranks.first(lambda: [one for event in self._owner.news() for one in self._told(event)]))
        except EngineRefuses:
            self._abandon()
            raise

    # memory

    def sleep(self, tags: Sequence[str]) -> None:
        tags = check_tags(tags)
        if self._work:
            raise EngineRefuses("engine: sleep while submitted work is unfinished; read stream() to its end, or abort, first")
        fresh = [tag for tag in tags if tag not in self._asleep]
        if fresh:
            self._owner.sleep(fresh)
        self._asleep.update(fresh)
        if "weights" in fresh:
            self._version, self._checksums, self._verified = None, None, False
            self._refusal = "its weights are asleep; wake them, write them and commit"

    def wake(self, tags: Sequence[str]) -> None:
        fresh = [tag for tag in check_tags(tags) if tag in self._asleep]
        if fresh:
            self._owner.wake(fresh)
        self._asleep.difference_update(fresh)
        if "weights" in fresh:
            self._refusal = "its weights were freed by sleep; write them and commit"

    def close(self) -> None:
        """End the engine and all its processes. Called at exit too."""
        self._owner.close()

    def stats(self) -> dict[str, float]:
        """Since the last commit: tokens, seconds (inside generation), tokens_per_second, checksum_seconds; running_samples now."""
        return {"tokens": self._tokens, "seconds": self._seconds, "tokens_per_second": self._tokens / self._seconds if self._seconds else 0.0,
                "checksum_seconds": self._checksum_seconds, "running_samples": len(self._work)}

    def _ready(self) -> None:
        """Agree over the ranks that all have the same version and work, and verify a new version once."""
        states = self._ranks.gather(RankState(self._refusal, self._version, self._submitted, sorted(self._asleep), bool(self._work)))
        if not any(s.busy for s in states):
            return
        if refusals := [s.refusal for s in states if s.refusal]:
            self._abandon()
            raise EngineRefuses(f"engine: {refusals[0]}")
        if why := asleep(states):
            self._abandon()
            raise EngineRefuses(f"engine: {why}")
        if why := disagreement(states):
            self._refuse(why)
        if not self._verified:
            self._verify()

    def _abandon(self) -> None:
        """Unfinished work ends unanswered."""
        if self._ranks.leads:
            self._owner.abort(list(self._sent))
        self._work.clear()
        self._sent.clear()
        self._finished.clear()

    def _refuse(self, why: str) -> None:
        """Stay refused until the next update."""
        self._refusal = self._refusal or why
        self._abandon()
        self._version = None
        raise EngineRefuses(f"engine: {why}")
