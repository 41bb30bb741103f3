"""TensorRT-LLM's PyTorch-backend executor inside every rank: the plan writes straight into its parameters, with no copy anywhere.

Internal names, pinned to versions (`seam.executor.READ`); what was read where, and what only a machine with GPUs can settle, is in
docs/tensorrt-llm.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from parallel.errors import UserError
from resharding.layouts import trtllm_layout
from resharding.piece_sums import PieceSums
from trtllm_rollout.driver import placement
from trtllm_rollout.driver.closing import Closing
from trtllm_rollout.driver.names import bind, why_not_rank_local
from trtllm_rollout.driver.owner import Setup
from trtllm_rollout.driver.seam import worker as seam
from trtllm_rollout.driver.seam.build import engine_arguments, make_sampling_params
from trtllm_rollout.driver.seam.executor import Executor, check_version, communicator
from trtllm_rollout.driver.serving import Event, Key, Loop, Serving, within


class InProcessOwner:
    """See `owner.Owner`. An update keeps the executor's loop still from `begin_update` to `hand_over`."""

    route, checked = "in place", True

    def __init__(self, setup: Setup) -> None:
        if why := why_not_rank_local(setup.model):
            raise UserError(f"rollout.tensorrt_llm.owner is inprocess, but {why}; set owner: ray")
        check_version(setup.features)
        self.setup, self.ranks, self._timeouts = setup, setup.ranks, setup.options
        self._still = ExitStack()
        os.environ.update({k: v for k, v in placement.SET.items() if k.startswith("TRT_LLM_")})
        self._communicator = communicator(setup.replica, len(setup.ranks.ranks))
        arguments = engine_arguments(setup.features, str(placement.config_directory(setup.model)), setup.engine_values())
        self._executor = within(self._timeouts.start_timeout_s, "create the executor and load the model",
                                lambda: Executor(setup.features, arguments))
        self._closing = Closing(self._shut_down)
        self._loop = Loop()
        self._serving = Serving(self._loop, self._executor.generate)
        try:
            self._adopt(setup)
        except Exception:
            self.close()
            raise

    def _adopt(self, setup: Setup) -> None:
        """The model's parameters, by the names of the layout."""
        tp, index = len(setup.ranks.ranks), setup.ranks.index
        self._parameters = dict(seam.model_of(self._executor.engine).named_parameters())
        if seam.tp_rank(self._executor.engine) != index:
            raise UserError(f"rank {setup.ranks.ranks[index]} is tp rank {index} of its replica, but TensorRT-LLM made it "
                            f"{seam.tp_rank(self._executor.engine)}; start ranks so that those of a host follow one another")
        layouts = [trtllm_layout(setup.model, tp, t, rank, setup.dtype, moe_ep=setup.moe_ep) for t, rank in enumerate(setup.ranks.ranks)]
        bound, names = bind(self._parameters, layouts[index])
        # a parameter that lacks its padding rows is its own layout: there is nothing to write there
        self.layouts = self.ranks.gather(bound)
        self.order = setup.ranks.ranks if self.layouts == layouts else None
        self._weights = {t.name: self._parameters[names[t.name]].detach() for t in bound.tensors}
        self._sums = PieceSums(bound)

    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self._weights)

    def begin_update(self) -> None:
        """Every rank's loop reaches the control request together, or the wait ends in EngineTimeout."""
        self._leave()
        within(self._timeouts.update_timeout_s, "come to rest for an update", lambda: self._still.enter_context(seam.quiet(self._executor.engine)))

    def hand_over(self) -> None:
        seam.after_load(self._executor.engine)
        self._leave()

    def _leave(self) -> None:
        within(self._timeouts.update_timeout_s, "go on after an update", self._still.close)

    def read_back(self) -> list[int]:
        return self._sums(self._weights)

    def submit(self, key: Key, prompt: tuple[int, ...], sampling: dict[str, Any], streaming: bool) -> None:
        self._serving.submit(key, prompt, make_sampling_params(self.setup.features, sampling), streaming)

    def news(self) -> list[Event]:
        return self._serving.news(self._timeouts.generate_timeout_s, "finish a sample")

    def abort(self, keys: Iterable[Key]) -> None:
        self._serving.abort(keys)

    def sleep(self, tags: Sequence[str]) -> None:
        def release() -> None:
            with seam.quiet(self._executor.engine):
                seam.forget_prefixes(self._executor.engine)
                seam.release(self._memory(tags))

        self._leave()
        within(self._timeouts.update_timeout_s, f"release {' and '.join(tags)}", release)

    def wake(self, tags: Sequence[str]) -> None:
        def materialize() -> None:
            with seam.quiet(self._executor.engine):
                seam.materialize(self._memory(tags))

        self._leave()
        within(self._timeouts.update_timeout_s, f"resume {' and '.join(tags)}", materialize)

    def _memory(self, tags: Sequence[str]) -> list[str]:
        return [name for tag in tags for name in self.setup.features.memory_tags(tag)]

    def close(self) -> None:
        self._closing.close()

    def _shut_down(self) -> None:
        within(60.0, "shut down", lambda: (self._still.close(), self._executor.shutdown()))
        self._loop.close()
