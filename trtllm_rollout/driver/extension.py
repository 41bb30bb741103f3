"""What is mixed into every TensorRT-LLM worker: methods that the driver calls by name through `collective_rpc`.

Imported in worker processes only (TensorRT-LLM resolves the dotted name). No method may have the name of one of the worker's, so all
begin with `mcore_rl_`. Each step of an update is numbered: one that comes again, after a timeout say, is not made again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from resharding.errors import WeightsError
from resharding.layout import Layout
from resharding.piece_sums import PieceSums
from trtllm_rollout.driver.handles import Handle, open_handles
from trtllm_rollout.driver.names import bind
from trtllm_rollout.driver.seam import worker as seam

Step = tuple[int, int]  # update, step of it; both count from 1


class RankLocalWeights(seam.extension_base()):  # type: ignore[misc]
    """Upstream's WorkerExtension and ours. `self.engine` is the worker's PyExecutor, `self.device_id` its GPU."""

    def mcore_rl_describe(self) -> dict[str, Any]:
        """Where this worker is and what it holds: uuid, tp_rank, partial (takes tensors bucket by bucket), parameters (shape, dtype)."""
        model = seam.model_of(self.engine)
        return {"uuid": seam.device_uuid(self.device_id), "tp_rank": seam.tp_rank(self.engine), "partial": seam.allows_partial(self.engine),
                "parameters": {name: (tuple(p.shape), p.dtype) for name, p in model.named_parameters()}}

    def mcore_rl_forget(self) -> None:
        """Invalidate cached prefixes: a release of memory does not."""
        with seam.quiet(self.engine):
            seam.forget_prefixes(self.engine)

    def mcore_rl_public(self, step: Step, handles: Mapping[str, str] | None) -> None:
        """One bucket through TensorRT-LLM's own update, or (None) its end."""
        if self._mcore_rl_is_next(step):
            self.update_weights(handles)
            self._mcore_rl_step = step

    def mcore_rl_whole(self, step: Step, handles: Mapping[str, Sequence[tuple[str, Handle]]]) -> None:
        """The whole model in one reload, for one whose loader does not take parts; and the end of the update."""
        if not self._mcore_rl_is_next(step):
            return
        with seam.quiet(self.engine):
            weights = open_handles(self._mcore_rl_mine(handles), self.device_id)
            seam.before_reload(self.engine)
            seam.reload(self.engine, weights, partial=False)
            del weights
            seam.after_load(self.engine)
        self._mcore_rl_step = step

    def mcore_rl_rank_local(self, step: Step, handles: Mapping[str, Sequence[tuple[str, Handle]]], layout: Mapping[str, Layout]) -> None:
        """This worker's shard, straight into the fused parameters; and the end of the update."""
        if not self._mcore_rl_is_next(step):
            return
        with seam.quiet(self.engine):
            shard = open_handles(self._mcore_rl_mine(handles), self.device_id)
            write(dict(seam.model_of(self.engine).named_parameters()), shard, self._mcore_rl_mine(layout))
            del shard
            seam.after_load(self.engine)
        self._mcore_rl_step = step

    def mcore_rl_sums(self, layout: Mapping[str, Layout]) -> tuple[str, list[int]]:
        """This worker's GPU, and the checksums of the pieces that its parameters hold, by its layout as bound."""
        mine = self._mcore_rl_mine(layout)
        return seam.device_uuid(self.device_id), sums(dict(seam.model_of(self.engine).named_parameters()), mine)

    def _mcore_rl_is_next(self, step: Step) -> bool:
        """Whether the step is still to be made. Raises WeightsError where one before it was lost."""
        last = getattr(self, "_mcore_rl_step", (0, 0))
        if step <= last:
            return False
        if step != (last[0], last[1] + 1) and step[1] != 1:
            raise WeightsError(f"step {step[1]} of weights update {step[0]} came after step {last[1]} of update {last[0]}: one was lost; "
                               "synchronise again from the start")
        return True

    def _mcore_rl_mine(self, by_uuid: Mapping[str, Any]) -> Any:
        uuid = seam.device_uuid(self.device_id)
        if uuid not in by_uuid:
            raise WeightsError(f"nothing was sent for GPU {uuid}; the trainer's ranks have {', '.join(sorted(by_uuid))}")
        return by_uuid[uuid]


@torch.no_grad()
def write(parameters: Mapping[str, torch.Tensor], shard: Mapping[str, torch.Tensor], layout: Layout) -> None:
    """Copy a shard into the parameters. Raises UserError where they do not fit, WeightsError where the shard lacks one; nothing is written then."""
    bound, names = bind(parameters, layout)
    if missing := [t.name for t in bound.tensors if t.name not in shard]:
        raise WeightsError(f"the shard of rank {layout.rank} lacks {', '.join(missing)}")
    for tensor in bound.tensors:  # a parameter may lack the padding rows at the end
        parameters[names[tensor.name]].copy_(shard[tensor.name][:tensor.shape[0]])


def sums(parameters: Mapping[str, torch.Tensor], layout: Layout) -> list[int]:
    """Checksums of every piece of the parameters that `layout` describes (zero for the padding that they lack)."""
    bound, names = bind(parameters, layout)
    values = iter(PieceSums(bound)({t.name: parameters[names[t.name]].detach() for t in bound.tensors}))
    return [next(values) if not _dropped(piece, bound[local.name].shape) else 0 for local in layout.tensors for piece in local.pieces]


def _dropped(piece: Any, shape: tuple[int, ...]) -> bool:
    return piece.canonical is None and piece.place[0][0] >= shape[0] and not piece.view.index
