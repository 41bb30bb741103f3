"""Which FP8 recipe trains where: Transformer Engine's by name, or the emulated `blockwise` of `parallel.fp8_linear`. There is no third.

Read from Megatron-Core 0.16 (`fp8_utils.get_fp8_recipe`) and Transformer Engine's own checks (`pytorch/fp8.py`: `check_fp8_support`,
`check_fp8_block_scaling_support`, `check_mxfp8_support`); tested with stand-ins for both, **not run with Transformer Engine itself**.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

import torch

from parallel.config import ParallelConfig
from parallel.device import Device
from parallel.errors import UserError
from parallel.micro_batch import MicroBatch
from parallel.model_config import ModelConfig

logger = logging.getLogger(__name__)
EMULATED = "blockwise"
Version = tuple[int, ...]


@dataclass(frozen=True)
class Recipe:
    """What a recipe of Transformer Engine asks for.

    `format` is Megatron's `fp8`: e4m3 for everything, or hybrid (gradients in e5m2). A device must have a compute capability of at
    least `lowest` and below `beyond`. Sizes of linear layers must be multiples of `sizes`, tokens of a rank are padded to `tokens`.
    """

    format: str
    te: Version
    lowest: Version
    beyond: Version = (99,)
    cuda: Version = (12, 1)
    sizes: int = 16
    tokens: int = 16


RECIPES: dict[str, Recipe] = {
    "delayed": Recipe("hybrid", (1, 11), (8, 9)),
    "tensorwise": Recipe("hybrid", (2, 2), (8, 9)),
    "blockwise": Recipe("e4m3", (2, 3), (9, 0), (10, 0), cuda=(12, 9), tokens=128),
    "mxfp8": Recipe("e4m3", (2, 1), (10, 0), (12, 0), cuda=(12, 8), sizes=32, tokens=32),
}


@dataclass(frozen=True)
class Platform:
    """What is installed and what it runs on; None where it is not there."""

    te: Version | None
    capability: Version | None
    cuda: Version | None


def this_platform() -> Platform:
    """Of this process."""
    try:
        te: Version | None = _numbers(metadata.version("transformer-engine"))
    except metadata.PackageNotFoundError:
        te = None
    there = torch.cuda.is_available()
    return Platform(te, torch.cuda.get_device_capability() if there else None, _numbers(torch.version.cuda) if there and torch.version.cuda else None)


def _numbers(version: str) -> Version:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())


def _text(version: Version) -> str:
    return ".".join(map(str, version))


def check_fp8(recipe: str | None, implementation: str, model: ModelConfig, parallel: ParallelConfig, dtype: torch.dtype, device: Device,
              platform: Platform | None = None) -> None:
    """Refuse a recipe that does not run here. Raises UserError that says what it needs, what is there, and what would run instead."""
    if recipe is None:
        return
    if recipe not in RECIPES:
        raise UserError(f"actor.fp8 is {recipe!r}; allowed: {', '.join(RECIPES)}, or null")
    if implementation != "te":
        if recipe != EMULATED:
            raise UserError(f"actor.fp8 is {recipe}, a recipe of Transformer Engine, and the layers are torch's; set layer_implementation: te (a GPU "
                            f"with Transformer Engine), or fp8: {EMULATED}, which is emulated")
        if device.type == "cuda":
            logger.warning("actor.fp8 %s is emulated (layer_implementation torch): the numbers of FP8, and slower than without it", recipe)
        return
    needs, there = RECIPES[recipe], platform or this_platform()
    runs = [name for name, r in RECIPES.items() if not list(_lacks(r, there))]
    for lack in _lacks(needs, there):
        raise UserError(f"actor.fp8 {recipe} needs {lack}; {'recipes that run here: ' + ', '.join(runs) if runs else 'no recipe runs here'}; null "
                        f"trains without FP8, and {EMULATED} with layer_implementation: torch emulates it")
    if dtype != torch.bfloat16:
        raise UserError(f"actor.fp8 {recipe} of Transformer Engine trains a bfloat16 model; set model.dtype: bfloat16")
    for name, size in _linear_sizes(model, parallel):
        if size % needs.sizes:
            raise UserError(f"actor.fp8 {recipe}: {name} is {size} on a rank; it must be a multiple of {needs.sizes}: choose a smaller tp, or fp8: null")


def _lacks(needs: Recipe, there: Platform) -> Iterator[str]:
    if there.te is None or there.te < needs.te:
        yield f"Transformer Engine {_text(needs.te)} or later, " + (f"{_text(there.te)} is installed" if there.te else "which is not installed")
    if there.capability is None or not needs.lowest <= there.capability < needs.beyond:
        span = f"{_text(needs.lowest)} or higher" if needs.beyond > (90,) else f"from {_text(needs.lowest)} to below {_text(needs.beyond)}"
        yield f"a device of compute capability {span}, " + (f"this one has {_text(there.capability)}" if there.capability else "there is none")
    if there.cuda is None or there.cuda < needs.cuda:
        yield f"CUDA {_text(needs.cuda)} or later, " + (f"torch has {_text(there.cuda)}" if there.cuda else "torch has none")


def _linear_sizes(model: ModelConfig, parallel: ParallelConfig) -> list[tuple[str, int]]:
    """Input and output sizes of a rank's linear layers."""
    out = [("hidden_size", model.hidden_size)]
    if model.mla is None:
        out += [("rows of the query, key and value projection", (model.q_size + 2 * model.kv_size) // parallel.tp), ("columns of o_proj", model.q_size // parallel.tp)]
    else:
        m = model.mla
        out += [("q_lora_rank", m.q_lora_rank or 0), ("kv_lora_rank", m.kv_lora_rank), ("kv_lora_rank + qk_rope_head_dim", m.kv_lora_rank + m.qk_rope_head_dim),
                ("columns of o_proj", model.num_heads * m.v_head_dim // parallel.tp)]
    if len(model.moe_layers) < model.num_layers:
        out.append(("intermediate_size", model.intermediate_size // parallel.tp))
    if model.moe is not None:
        out.append(("the experts' intermediate size", model.moe.intermediate_size // parallel.expert_tp))
    return out


def te_options(recipe: str | None) -> dict[str, Any]:
    """Fields of Megatron's TransformerConfig. Weights stay in bf16 (no `fp8_param`): the sync quantises what it sends."""
    return {} if recipe is None else dict(fp8=RECIPES[recipe].format, fp8_recipe=recipe)


def fill_up(micro_batch: MicroBatch, recipe: str, parallel: ParallelConfig) -> MicroBatch:
    """A micro-batch whose rows are padded so that the tokens of every rank fill Transformer Engine's blocks."""
    tokens = micro_batch.tokens
    multiple = RECIPES[recipe].tokens * parallel.cp * (parallel.tp if parallel.sequence_parallel else 1)
    width, more = tokens.shape[1], -tokens.shape[1] % multiple
    if micro_batch.segments is None:
        rows = micro_batch.rows // width * (width + more) + micro_batch.rows % width
    else:
        rows = micro_batch.rows
    return replace(micro_batch, tokens=torch.nn.functional.pad(tokens, (0, more)), positions=torch.nn.functional.pad(micro_batch.positions, (0, more)), rows=rows)
