"""Which parameter of TensorRT-LLM's model holds which tensor of our `trtllm` layout, checked one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import torch

from parallel.errors import UserError
from parallel.model_config import ModelConfig
from resharding.errors import listed
from resharding.layout import IDENTITY, Layout, LocalTensor, Piece

# whose fused parameters were read in upstream's modules. Latent attention (deepseek) derives tensors while loading, which a write into
# the parameters leaves stale; gpt_oss reorders its experts for the kernels
KNOWN = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral")


def why_not_rank_local(model: ModelConfig) -> str | None:
    """Why the model's shards cannot be written straight into TensorRT-LLM's parameters, or None."""
    if model.family not in KNOWN:
        return (f"the parameters of family {model.family} are not known to be our layout (known: {', '.join(KNOWN)}): TensorRT-LLM derives or "
                "reorders some of them while it loads")
    if model.hf.get("quantization_config"):
        return "the model is quantised, and scales are derived while loading"
    return None


def bind(parameters: Mapping[str, torch.Tensor] | Mapping[str, tuple[tuple[int, ...], torch.dtype]], layout: Layout) -> tuple[Layout, dict[str, str]]:
    """(the layout as the parameters have it, their name by layout name).

    `parameters`: of the model, tensors or (shape, dtype). The last rank's vocabulary may lack the rows that pad it, else shapes and
    dtypes must be the layout's. Raises UserError that names what does not fit: missing, of another shape or dtype, or not in the layout.
    """
    held = {name: (tuple(p.shape), p.dtype) if isinstance(p, torch.Tensor) else p for name, p in parameters.items()}
    names: dict[str, str] = {}
    tensors: list[LocalTensor] = []
    problems: list[str] = []
    for local in layout.tensors:
        name = next((n for n in _candidates(local.name) if n in held), None)
        if name is None:
            problems.append(f"{local.name} is missing")
            continue
        shape, dtype = held[name]
        fitted = _fit(local, shape)
        if fitted is None or dtype != local.dtype:
            problems.append(f"{name} is {shape} {dtype}, the layout says {local.shape} {local.dtype}")
            continue
        names[local.name] = name
        tensors.append(fitted)
    strange = [name for name in held if name not in set(names.values())]
    if strange and not problems:
        problems.append(f"no canonical tensor goes into {listed(strange)}")
    if problems:
        raise UserError(f"TensorRT-LLM's parameters are not the layout of rank {layout.rank}: {listed(problems)}; set "
                        "rollout.tensorrt_llm.weights: public")
    return dataclasses.replace(layout, tensors=tuple(tensors)), names


def _candidates(name: str) -> Iterable[str]:
    """Upstream wraps the expert module in some versions."""
    yield name
    yield name.replace(".experts.", ".experts.backend.")


def _fit(local: LocalTensor, shape: tuple[int, ...]) -> LocalTensor | None:
    """The layout's tensor with the parameter's shape, where that lacks nothing but padding rows at the end; else None."""
    if shape == local.shape:
        return local
    if len(shape) != len(local.shape) or shape[1:] != local.shape[1:] or shape[0] > local.shape[0] or any(p.view != IDENTITY for p in local.pieces):
        return None
    pieces: list[Piece] = []
    for piece in local.pieces:
        end = piece.place[0][1]
        if piece.canonical is None:
            (start, _), *rest = piece.place
            if start < shape[0]:
                rows = shape[0] - start
                pieces.append(dataclasses.replace(piece, region=((0, rows), *piece.region[1:])))
        elif end > shape[0]:
            return None
        else:
            pieces.append(piece)
    return dataclasses.replace(local, shape=shape, pieces=tuple(pieces))
