"""The public AsyncLLM, held by the first rank of a replica. Its workers are other processes on the same GPUs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from parallel.errors import UserError
from resharding.errors import WeightsError, listed
from resharding.layout import canonical_shapes
from resharding.layouts import trtllm_layout
from resharding.piece_sums import PieceSums
from trtllm_rollout.driver import placement
from trtllm_rollout.driver.closing import Closing
from trtllm_rollout.driver.handles import encode, make_handles
from trtllm_rollout.driver.names import bind, why_not_rank_local
from trtllm_rollout.driver.owner import Setup
from trtllm_rollout.driver.seam.build import engine_arguments, make_sampling_params
from trtllm_rollout.driver.seam.llm import Llm, ray_is_there
from trtllm_rollout.driver.serving import Event, Key, Loop, Serving
from trtllm_rollout.driver.staging import Bucket, Staging, all_names, full_tensors, make_buckets

logger = logging.getLogger(__name__)
EXTENSION = "trtllm_rollout.driver.extension.RankLocalWeights"  # resolved by the workers, not imported here


class RayOwner:
    """See `owner.Owner`. `route` is "rank_local", "public" or "whole" (one full reload); `checked`: parameters can be read back."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.ranks, self._timeouts = setup, setup.ranks, setup.options
        self._loop: Loop | None = None
        self._closing: Closing | None = None
        self._update = self._step = 0
        uuids = self.ranks.gather(placement.gpu_uuid(setup.device))
        self._uuid = uuids[self.ranks.index]
        try:
            self._adopt(setup, self.ranks.first(lambda: self._start(setup)), uuids)
        except Exception:
            self.close()
            raise

    def _start(self, setup: Setup) -> list[dict[str, Any]]:
        """First rank: the engine and its workers."""
        if not ray_is_there():
            raise UserError("rollout.tensorrt_llm.owner is ray, but the package ray is not installed; pip install 'ray[default]' (the version that "
                            "tensorrt_llm's requirements name), or set owner: inprocess")
        directory = placement.config_directory(setup.model)
        self._loop = Loop()
        self._closing = Closing(self._shut_down)
        first = setup.device.index or 0
        devices = range(first, first + len(self.ranks.ranks)) if setup.device.type == "cuda" else range(0)
        with placement.starting_in(placement.worker_environment(placement.os.environ, devices)):
            self._llm = Llm(setup.features, engine_arguments(setup.features, str(directory), setup.engine_values()), EXTENSION)
            self._call(self._llm.start(), self._timeouts.start_timeout_s, "start its workers and load the model")
        self._serving = Serving(self._loop, self._llm.generate)
        return [dict(w) for w in self._call(self._llm.rpc("mcore_rl_describe"), self._timeouts.start_timeout_s, "describe its workers")]

    def _adopt(self, setup: Setup, workers: list[dict[str, Any]], uuids: list[str]) -> None:
        """Which worker shares this rank's GPU, and which way its weights take."""
        tp, tp_ranks = len(self.ranks.ranks), placement.match_workers(workers, uuids)
        self._names = {placement.plain_uuid(w["uuid"]): w["uuid"] for w in workers}  # as each worker calls its own GPU
        self.layouts = [trtllm_layout(setup.model, tp, t, rank, setup.dtype, moe_ep=setup.moe_ep) for t, rank in zip(tp_ranks, self.ranks.ranks)]
        self.layout = self.layouts[self.ranks.index]
        self.order = tuple(rank for _, rank in sorted(zip(tp_ranks, self.ranks.ranks)))
        why = why_not_rank_local(setup.model)
        if why is None:
            by_rank = {int(w["tp_rank"]): w for w in workers}
            try:
                for tp_rank, layout in zip(tp_ranks, self.layouts):
                    bind(by_rank[tp_rank]["parameters"], layout)
            except UserError as error:
                why = str(error)
        wanted, partial = setup.options.weights, all(w["partial"] for w in workers)
        if why is not None and wanted == "rank_local":
            raise UserError(f"rollout.tensorrt_llm.weights is rank_local, but {why}; set it to auto or public")
        self.checked = why is None
        self.route = "rank_local" if why is None and wanted != "public" else "public" if partial else "whole"
        if self.ranks.leads:
            reason = f" ({why})" if why else ""
            logger.info("TensorRT-LLM: weights go the way %s%s", self.route, reason)
            if self.route == "whole":
                logger.warning("TensorRT-LLM's loader of %s does not take part of a model: every update holds all full tensors on every GPU",
                               setup.model.hf.get("architectures", [setup.model.family])[0])
        self.staging = Staging(self.layout, setup.device)
        self._sums = PieceSums(self.layout)
        self._handed: list[int] = []
        self._buckets = [] if self.route == "rank_local" else make_buckets(
            setup.model, setup.dtype, self.layouts, self.ranks.ranks[self.ranks.index],
            setup.options.bucket_mb << 20 if self.route == "public" else 1 << 62)
        if self._buckets:  # TensorRT-LLM keeps the old value of a name that is not sent, and says nothing
            missing = canonical_shapes(setup.model).keys() - set(all_names(self._buckets))
            if missing:
                raise WeightsError(f"an update would leave out {listed(sorted(missing))}")

    # weights

    def weights(self) -> dict[str, torch.Tensor]:
        return self.staging.fill()

    def begin_update(self) -> None:
        self._update, self._step = self._update + 1, 0
        self.ranks.first(lambda: self._call(self._llm.pause(), self._timeouts.update_timeout_s, "pause generation"))

    def hand_over(self) -> None:
        """Raises WeightsError, UserError or EngineRefuses on all ranks where any fails; the engine then keeps refusing."""
        try:
            if not self.checked:
                self._handed = self._sums(self.staging.tensors)
            if self.route == "rank_local":
                handles = self.ranks.all(lambda: (self._uuid, make_handles(self.staging.tensors), self.layout))
                mine = {self._names[u]: h for u, h, _ in handles}, {self._names[u]: layout for u, _, layout in handles}
                self._tell("copy the shards into the parameters", "mcore_rl_rank_local", lambda: mine)
            else:
                self._send_full()
        finally:
            self.staging.empty()
        self.ranks.first(lambda: self._call(self._llm.go_on(), self._timeouts.update_timeout_s, "resume generation"))

    def _send_full(self) -> None:
        method, form = ("mcore_rl_public", encode) if self.route == "public" else ("mcore_rl_whole", list)
        for i, bucket in enumerate(self._buckets):
            self._send_bucket(bucket, f"load bucket {i + 1} of {len(self._buckets)}", method, form)
        if self.route == "public":
            self._tell("finish the update", method, lambda: (None,))

    def _send_bucket(self, bucket: Bucket, what: str, method: str, form: Callable[[Any], Any]) -> None:
        """The tensors behind the handles are let go when every worker has answered."""
        tensors = full_tensors(bucket, self.staging.tensors, self.layout.rank, self.ranks.group, self.setup.device)
        handles = self.ranks.all(lambda: (self._names[self._uuid], form(make_handles(tensors))))
        self._tell(what, method, lambda: (dict(handles),))

    def _tell(self, what: str, method: str, arguments: Callable[[], tuple[Any, ...]]) -> None:
        """Collective: one numbered step of the update on every worker."""
        self._step += 1
        step = (self._update, self._step)
        self.ranks.first(lambda: self._call(self._llm.rpc(method, step, *arguments()), self._timeouts.update_timeout_s, what) and None)

    def read_back(self) -> list[int]:
        if not self.checked:
            return self._handed
        layouts = self.ranks.gather((self._names[self._uuid], self.layout))
        found = self.ranks.first(lambda: self._call(self._llm.rpc("mcore_rl_sums", dict(layouts)), self._timeouts.update_timeout_s,
                                                    "add up its parameters"))
        return next(sums for uuid, sums in found if placement.plain_uuid(uuid) == self._uuid)

    # generation, on the first rank

    def submit(self, key: Key, prompt: tuple[int, ...], sampling: dict[str, Any], streaming: bool) -> None:
        self._serving.submit(key, prompt, make_sampling_params(self.setup.features, sampling), streaming)

    def news(self) -> list[Event]:
        return self._serving.news(self._timeouts.generate_timeout_s, "finish a sample")

    def abort(self, keys: Iterable[Key]) -> None:
        self._serving.abort(keys)

    # memory

    def sleep(self, tags: Sequence[str]) -> None:
        def release() -> None:
            self._call(self._llm.rpc("mcore_rl_forget"), self._timeouts.update_timeout_s, "reset its prefix cache")  # a release does not
            self._call(self._llm.release(self._memory(tags)), self._timeouts.update_timeout_s, f"release {' and '.join(tags)}")

        self.ranks.first(release)

    def wake(self, tags: Sequence[str]) -> None:
        self.ranks.first(lambda: self._call(self._llm.resume(self._memory(tags)), self._timeouts.update_timeout_s, f"resume {' and '.join(tags)}"))

    def _memory(self, tags: Sequence[str]) -> list[str]:
        return [name for tag in tags for name in self.setup.features.memory_tags(tag)]

    # the end

    def close(self) -> None:
        if self._closing is not None:
            self._closing.close()

    def _shut_down(self) -> None:
        if self._loop is None:
            return
        loop, self._loop = self._loop, None
        try:
            if hasattr(self, "_llm"):
                loop.call(self._llm.shutdown(), 60.0, "shut down")
        except Exception as error:  # nothing waits for this engine any more
            logger.warning("TensorRT-LLM did not shut down: %s", error)
        finally:
            loop.close()

    def _call(self, coroutine: Any, seconds: float, what: str) -> Any:
        if self._loop is None:
            coroutine.close()
            raise UserError("the engine is closed")
        return self._loop.call(coroutine, seconds, what)
