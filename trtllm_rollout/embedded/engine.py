"""The embedded engine: the engine protocol on PyTorch, with its weights in TensorRT-LLM's rank-local layout."""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from parallel.errors import UserError
from parallel.memory import give_back_freed
from parallel.model_config import ModelConfig
from resharding.checksum import verify
from resharding.errors import WeightsError
from resharding.layout import Layout
from resharding.layouts import trtllm_layout
from resharding.layouts.fp8 import fp8_layout, fp8_weights
from resharding.piece_sums import PieceSums
from trtllm_rollout.checks import RankState, asleep, check_tags, disagreement
from trtllm_rollout.embedded.blocks import BlockPool
from trtllm_rollout.embedded.decoder import Decoder, TensorParallel
from trtllm_rollout.embedded.generation import Generation
from trtllm_rollout.embedded.kv_cache import KVCache, block_count
from trtllm_rollout.embedded.limits import Limits
from trtllm_rollout.embedded.scheduler import Scheduler
from trtllm_rollout.protocol import Completion, EngineRefuses, Progress, Request


class EmbeddedEngine:
    """One tensor-parallel rank of the engine (see `trtllm_rollout.protocol.Engine` for the calls).

    `tp_group` is the process group of its `tp` ranks (None: one rank), `tp_rank` this rank's place in it and `rank` its
    global rank. At most `max_batch_size` samples are generated at once, with at most `max_num_tokens` tokens computed a step (None:
    2048, or what the batch needs); prompt and answer together are at most `max_seq_len` tokens (None: the model's
    max_position_embeddings). Keys and values are kept in blocks of `block_size` tokens within `kv_cache_bytes` (None: what the
    largest batch needs, or a share of the free memory), and beginnings of prompts between requests if `enable_prefix_cache`.
    `detokenize` turns token ids into text, for stop strings. Whole experts are dealt over `moe_ep` of the ranks, and cut over the tp / moe_ep
    others. `fp8` holds matrices as FP8 codes with a scale for every 128 x 128 block (`resharding.layouts.fp8`), and computes in `dtype`; `fp8_rows`
    rounds the rows that are multiplied with them too, as TensorRT-LLM does (of latent attention all but those of the absorbed kv_b_proj). `report_experts`: completions tell which experts their tokens went to.
    """

    def __init__(self, model: ModelConfig, dtype: torch.dtype, tp_group: dist.ProcessGroup | None = None, tp: int = 1,
                 tp_rank: int = 0, rank: int = 0, max_batch_size: int = 256, max_seq_len: int | None = None,
                 device: str | torch.device = "cpu", max_num_tokens: int | None = None, kv_cache_bytes: int | None = None,
                 block_size: int = 32, enable_prefix_cache: bool = True, detokenize: Callable[[Sequence[int]], str] | None = None,
                 moe_ep: int = 1, fp8: bool = False, fp8_rows: bool = False, report_experts: bool = False) -> None:
        ranks = [rank] if tp_group is None else dist.get_process_group_ranks(tp_group)
        if len(ranks) != tp or ranks[tp_rank] != rank:
            raise ValueError(f"engine: rank {rank} as tp rank {tp_rank} of {tp} does not match the ranks {ranks} of its group")
        self._limits = limits = Limits.checked(model, max_batch_size, max_seq_len, max_num_tokens, block_size, detokenize is not None)
        self._model = model
        self._parallel = TensorParallel(tp_group, tp, tp_rank, moe_ep)
        self._layouts = [trtllm_layout(model, tp, i, r, dtype, moe_ep=moe_ep) for i, r in enumerate(ranks)]
        if fp8:
            matrices = fp8_weights(model)
            self._layouts = [fp8_layout(layout, matrices) for layout in self._layouts]
        self._sums = PieceSums(self._layouts[tp_rank])
        device = torch.device(device)
        self._weights = {t.name: torch.zeros(t.shape, dtype=t.dtype, device=device) for t in self._layouts[tp_rank].tensors}
        decoder = Decoder(model, self._weights, self._parallel, limits.max_seq_len, fp8 and fp8_rows)
        choices = (len(model.moe_layers), model.moe.top_k) if report_experts and model.moe else None
        blocks = min(self._gather(block_count(decoder.heads, block_size, dtype, device, kv_cache_bytes, max_batch_size, limits.max_seq_len,
                                              choices)))
        self._cache = KVCache(decoder.heads, blocks, block_size, dtype, device, choices)
        self._pool = BlockPool(blocks, block_size, enable_prefix_cache)
        scheduler = Scheduler(self._pool, max_batch_size, limits.max_num_tokens)
        self._work = Generation(decoder, self._cache, scheduler, self._parallel, model.vocab_size, device, detokenize)
        self._finished: deque[Completion | Progress] = deque()
        self._version: int | None = None
        self._checksums: Mapping[str, int] | None = None
        self._verified = False
        self._refusal = "no weights version is committed; write weights() and call commit"
        self._asleep: set[str] = set()
        self._submitted = 0  # running hash of all submitted requests, compared between ranks
        self._agreed = 0  # of which the ranks have compared
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
        self._work.reset_cache()
        self._version, self._checksums, self._verified = None, None, False
        self._refusal = "a weights update is under way; commit it first"

    def commit(self, version: int, checksums: Mapping[str, int] | None = None) -> None:
        if "weights" in self._asleep:
            raise EngineRefuses(f"engine: cannot commit version {version}: its weights are asleep; wake them and write them first")
        if self._version is not None:
            raise EngineRefuses(f"engine: commit of version {version} without begin_update; version {self._version} is committed")
        self._version, self._checksums, self._verified, self._refusal = version, checksums, False, ""
        self._seconds = self._checksum_seconds = 0.0
        self._work.reset_cache()
        self._work.reset_counts()

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
            self._limits.check(request, self._model, self._pool)
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
                if isinstance(done := self._finished.popleft(), Completion):
                    yield done
            if self._work.busy:
                self._advance()

    def step(self) -> list[Completion | Progress]:
        if self._work.busy:
            self._advance()
        done = list(self._finished)
        self._finished.clear()
        return done

    def _advance(self) -> None:
        """One step of the work, timed; a refusal ends all of it. Work may have come since the last one, and an update."""
        if self._version is None or not self._verified or self._agreed != self._submitted:
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
        tags = check_tags(tags)
        if self._work.busy:
            raise EngineRefuses("engine: sleep while submitted work is unfinished; read stream() to its end, or abort, first")
        self._asleep.update(tags)
        if "kv_cache" in tags:
            self._work.reset_cache()
            self._cache.drop()
        if "weights" in tags:
            self.begin_update()
            self._refusal = "its weights are asleep; wake them, write them and commit"
            for tensor in self._weights.values():
                tensor.untyped_storage().resize_(0)
        give_back_freed()

    def wake(self, tags: Sequence[str]) -> None:
        tags = check_tags(tags)
        if "weights" in tags and "weights" in self._asleep:
            for tensor in self._weights.values():
                tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
                tensor.zero_()
            self._refusal = "its weights were freed by sleep; write them and commit"
        self._asleep.difference_update(tags)

    def stats(self) -> dict[str, float]:
        """Counts and seconds since the last commit, and what is held now: running_samples, kv_blocks_used, kv_cache_bytes, ...

        `seconds` is the time inside generation steps, in `seconds_prefill`, `seconds_decode` (products and attention), `seconds_sampling`
        and `seconds_other` by what it was spent on, `checksum_seconds` that of the verification before the first token. `batch_occupancy`
        is the mean share of max_batch_size that ran; `mean_queued_seconds`, `mean_first_token_seconds` and `mean_total_seconds` are over
        finished samples since their submission, `longest_seconds` is of the slowest of them.
        """
        work, counts = self._work, self._work.counts
        speed = counts["tokens"] / self._seconds if self._seconds else 0.0
        occupancy = counts["batch_samples"] / (counts["steps"] * self._limits.max_batch_size) if counts["steps"] else 0.0
        finished = max(1, counts["completions"])
        return {**counts, **work.load(), "seconds": self._seconds, "tokens_per_second": speed, "batch_occupancy": occupancy,
                **{f"seconds_{name}": seconds for name, seconds in work.phases.items()},
                **{f"mean_{name}_seconds": work.waits[name] / finished for name in ("queued", "first_token", "total")},
                "longest_seconds": work.waits["longest"], "checksum_seconds": self._checksum_seconds, "kv_cache_bytes": self._cache.nbytes,
                "weights_bytes": sum(t.untyped_storage().nbytes() for t in self._weights.values())}

    def _ready(self) -> None:
        """Agree over the group that every rank has the same version and work, and verify a new version once."""
        states = self._gather(RankState(self._refusal, self._version, self._submitted, sorted(self._asleep), self._work.busy))
        refusals = [f"tp rank {i}: {s.refusal}" if len(states) > 1 else s.refusal for i, s in enumerate(states) if s.refusal]
        if refusals and any(s.busy for s in states):
            self._refuse("; ".join(refusals))
        self._agreed = self._submitted
        if not any(s.busy for s in states):
            return
        if why := asleep(states):
            self._end_work()
            raise EngineRefuses(f"engine: {why}")
        if why := disagreement(states):
            self._refuse(why)
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
