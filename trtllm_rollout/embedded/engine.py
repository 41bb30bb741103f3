"""The embedded engine: the engine protocol on PyTorch, with its weights in TensorRT-LLM's rank-local layout."""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from parallel.errors import UserError, nearest
from parallel.model_config import ModelConfig
from resharding.checksum import verify
from resharding.errors import WeightsError
from resharding.layout import Layout
from resharding.layouts import trtllm_layout
from resharding.piece_sums import PieceSums
from trtllm_rollout.embedded.decoder import Decoder, TensorParallel, check_decodable
from trtllm_rollout.embedded.generation import Generation
from trtllm_rollout.embedded.kv_cache import KVCache
from trtllm_rollout.protocol import Completion, EngineRefuses, Request

MAX_PREFILL_TOKENS = 8192
TAGS = ("kv_cache", "weights")


class EmbeddedEngine:
    """One tensor-parallel rank of the engine (see `trtllm_rollout.protocol.Engine` for the calls).

    `tp_group` is the process group of its `tp` ranks (None: one rank), `tp_rank` this rank's place in it and `rank` its
    global rank. At most `max_batch_size` samples are generated at once; prompt and answer together are at most `max_seq_len`
    tokens (None: the model's max_position_embeddings).
    """

    def __init__(self, model: ModelConfig, dtype: torch.dtype, tp_group: dist.ProcessGroup | None = None, tp: int = 1,
                 tp_rank: int = 0, rank: int = 0, max_batch_size: int = 256, max_seq_len: int | None = None,
                 device: str | torch.device = "cpu") -> None:
        check_decodable(model)
        ranks = [rank] if tp_group is None else dist.get_process_group_ranks(tp_group)
        if len(ranks) != tp or ranks[tp_rank] != rank:
            raise ValueError(f"engine: rank {rank} as tp rank {tp_rank} of {tp} does not match the ranks {ranks} of its group")
        if max_batch_size < 1:
            raise UserError(f"rollout: max_batch_size is {max_batch_size}; it must be at least 1")
        limit = model.max_position_embeddings
        if max_seq_len is not None and not 1 <= max_seq_len <= limit:
            raise UserError(f"rollout: max_seq_len is {max_seq_len}; it must be between 1 and the model's max_position_embeddings {limit}")
        self._model, self._max_seq_len = model, max_seq_len or limit
        self._parallel = TensorParallel(tp_group, tp, tp_rank)
        self._layouts = [trtllm_layout(model, tp, i, r, dtype) for i, r in enumerate(ranks)]
        self._sums = PieceSums(self._layouts[tp_rank])
        device = torch.device(device)
        self._weights = {t.name: torch.zeros(t.shape, dtype=t.dtype, device=device) for t in self._layouts[tp_rank].tensors}
        decoder = Decoder(model, self._weights, self._parallel, self._max_seq_len)
        self._cache = KVCache(model, decoder.kv_heads, dtype, device)
        self._work = Generation(decoder, self._cache, self._parallel, device, max_batch_size, MAX_PREFILL_TOKENS)
        self._finished: deque[Completion] = deque()
        self._version: int | None = None
        self._checksums: Mapping[str, int] | None = None
        self._verified = False
        self._refusal = "no weights version is committed; write weights() and call commit"
        self._asleep: set[str] = set()
        self._submitted = 0  # running hash of all submitted requests, compared between ranks
        self._seconds = self._checksum_seconds = 0.0

    @property
    def version(self) -> int | None:
        return self._version

    @property
    def layouts(self) -> list[Layout]:
        return self._layouts

    def weights(self) -> dict[str, torch.Tensor]:
        if "weights" in self._asleep:
            raise EngineRefuses("engine: its weights are asleep; wake(['weights']) first")
        return dict(self._weights)

    def begin_update(self) -> None:
        self._finished += self._work.abort(None, self._version)
        self._version, self._checksums, self._verified = None, None, False
        self._refusal = "a weights update is under way; commit it first"

    def commit(self, version: int, checksums: Mapping[str, int] | None = None) -> None:
        if "weights" in self._asleep:
            raise EngineRefuses(f"engine: cannot commit version {version}: its weights are asleep; wake them and write them first")
        if self._version is not None:
            raise EngineRefuses(f"engine: commit of version {version} without begin_update; version {self._version} is committed")
        self._version, self._checksums, self._verified, self._refusal = version, checksums, False, ""
        self._seconds = self._checksum_seconds = 0.0
        self._work.counts = dict.fromkeys(self._work.counts, 0)

    def verify(self) -> None:
        """Compare what is resident with the committed checksums now, on all ranks of the group, rather than before the first token.

        Raises WeightsError that names the tensor; the engine then refuses to generate until the next update.
        """
        try:
            if not self._verified:
                self._verify()
        except EngineRefuses as error:
            raise WeightsError(str(error)) from None

    def submit(self, requests: Sequence[Request]) -> None:
        known = self._work.request_ids()
        for request in requests:
            self._check(request)
            if request.request_id in known:
                raise UserError(f"request {request.request_id}: an unfinished request has this id already; ids must differ")
            known.add(request.request_id)
        if self._parallel.size > 1:
            self._submitted = zlib.crc32(repr(list(requests)).encode(), self._submitted)
        self._work.add(requests)

    def stream(self) -> Iterator[Completion]:
        self._ready()
        while self._finished or self._work.busy:
            while self._finished:
                yield self._finished.popleft()
            if self._work.busy:
                self._advance()

    def _advance(self) -> None:
        """One step of the work, timed; a refusal ends all of it. Work may have come since the stream began, and an update."""
        if self._version is None or not self._verified:
            self._ready()
        start = time.perf_counter()
        try:
            self._finished += self._work.step(self._version)
        except EngineRefuses as error:
            self._refuse(str(error))
        finally:
            self._seconds += time.perf_counter() - start

    def abort(self, request_ids: Iterable[int]) -> None:
        self._finished += self._work.abort(list(request_ids), self._version)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        if self._work.busy or self._finished:
            raise EngineRefuses("engine: generate while submitted work is unfinished; read stream() to its end first")
        order = {request.request_id: i for i, request in enumerate(requests)}
        self.submit(requests)
        return sorted(self.stream(), key=lambda c: (order[c.request_id], c.sample))

    def sleep(self, tags: Sequence[str]) -> None:
        _check_tags(tags)
        if self._work.busy:
            raise EngineRefuses("engine: sleep while submitted work is unfinished; read stream() to its end, or abort, first")
        self._asleep.update(tags)
        if "kv_cache" in tags:
            self._cache.drop()
        if "weights" in tags:
            self.begin_update()
            self._refusal = "its weights are asleep; wake them, write them and commit"
            for tensor in self._weights.values():
                tensor.untyped_storage().resize_(0)

    def wake(self, tags: Sequence[str]) -> None:
        _check_tags(tags)
        if "weights" in tags and "weights" in self._asleep:
            for tensor in self._weights.values():
                tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
                tensor.zero_()
            self._refusal = "its weights were freed by sleep; write them and commit"
        self._asleep.difference_update(tags)

    def stats(self) -> dict[str, float]:
        """Counts and seconds since the last commit, and what is held now: running_samples, kv_cache_bytes, weights_bytes, ...

        `seconds` is the time inside generation steps, `checksum_seconds` that of the verification before the first token.
        """
        counts = self._work.counts
        speed = counts["tokens"] / self._seconds if self._seconds else 0.0
        return {**counts, **self._work.load(), "seconds": self._seconds, "tokens_per_second": speed,
                "checksum_seconds": self._checksum_seconds, "kv_cache_bytes": self._cache.nbytes,
                "weights_bytes": sum(t.untyped_storage().nbytes() for t in self._weights.values())}

    def _check(self, request: Request) -> None:
        """Refuse a request that cannot be generated. Raises UserError with the numbers."""
        count, more, vocab = len(request.prompt_ids), request.sampling.max_tokens, self._model.vocab_size
        if count + more > self._max_seq_len:
            raise UserError(f"request {request.request_id}: {count} prompt tokens + max_tokens {more} = {count + more} exceed the engine's "
                            f"{self._max_seq_len} (the model's max_position_embeddings: {self._model.max_position_embeddings}); "
                            "shorten the prompt or lower max_tokens")
        for token in (min(request.prompt_ids), max(request.prompt_ids)):
            if not 0 <= token < vocab:
                raise UserError(f"request {request.request_id}: prompt id {token} is outside the vocabulary of {vocab}; "
                                "was it tokenized for another model?")

    def _ready(self) -> None:
        """Agree over the group that every rank has the same version and work, and verify a new version once."""
        states = self._gather((self._refusal, self._version, self._submitted, sorted(self._asleep), self._work.busy))
        refusals = [f"tp rank {i}: {s[0]}" if len(states) > 1 else s[0] for i, s in enumerate(states) if s[0]]
        if refusals and any(s[4] for s in states):
            self._refuse("; ".join(refusals))
        if not any(s[4] for s in states):
            return
        if asleep := [s[3] for s in states if s[3]]:
            self._end_work()
            raise EngineRefuses(f"engine: {' and '.join(asleep[0])} asleep; wake first")
        if any(s[1:3] != states[0][1:3] for s in states):
            work = "differ" if len({s[2] for s in states}) > 1 else "equal"
            self._refuse(f"ranks disagree: versions {[s[1] for s in states]}, requests {work}; every rank must commit the same version "
                         "and submit the same requests")
        if not self._verified:
            self._verify()

    def _verify(self) -> None:
        """Compare the checksums of what is resident with what was committed, on all ranks; all ranks reach the same verdict."""
        start = time.perf_counter()
        values = self._gather(self._sums(self._weights))
        try:
            verify(self._layouts, values, self._checksums)
        except WeightsError as error:
            self._refuse(f"weights version {self._version} are not what was committed: {error}")
        finally:
            self._checksum_seconds += time.perf_counter() - start
        self._verified = True

    def _refuse(self, why: str) -> None:
        """Stay refused until the next update; unfinished work ends unanswered."""
        self._refusal = self._refusal or why
        self._end_work()
        raise EngineRefuses(f"engine: {why}")

    def _end_work(self) -> None:
        self._work.abort(None, self._version)
        self._finished.clear()

    def _gather(self, value: Any) -> list[Any]:
        if self._parallel.size == 1:
            return [value]
        values: list[Any] = [None] * self._parallel.size
        dist.all_gather_object(values, value, group=self._parallel.group)
        return values


def _check_tags(tags: Sequence[str]) -> None:
    for tag in [tags] if isinstance(tags, str) else tags:
        if tag not in TAGS:
            close = nearest(tag, TAGS)
            hint = f", did you mean {close!r}?" if close else ""
            raise UserError(f"engine sleep/wake: unknown tag {tag!r}{hint}; allowed: a list of {', '.join(TAGS)}")
