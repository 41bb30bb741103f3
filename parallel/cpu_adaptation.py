"""Megatron-Core on the CPU: what it must see instead of CUDA, confined to Megatron-Core's own modules.

Megatron-Core asks `torch.cuda` for devices, streams and random states. Instead of changing the user's torch, every loaded
`megatron.core` module gets its own view of the name `torch` (class `_TorchView`) in which CUDA calls mean the CPU. What a
view cannot reach is replaced by name in `_REPLACEMENTS`; every entry says why. Checked against the installed version at
start: an unknown version or a missing name is refused rather than half adapted. Never imported where CUDA is used.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from parallel.errors import UserError

TESTED_VERSIONS = ("0.16",)

_MODULES = (  # loaded up front so that they are adapted; whatever they import comes with them
    "megatron.core.parallel_state", "megatron.core.tensor_parallel", "megatron.core.distributed", "megatron.core.optimizer",
    "megatron.core.optimizer.distrib_optimizer", "megatron.core.optimizer_param_scheduler", "megatron.core.pipeline_parallel",
    "megatron.core.models.gpt", "megatron.core.models.gpt.gpt_layer_specs", "megatron.core.dist_checkpointing",
    "megatron.core.transformer.transformer_config", "megatron.core.tensor_parallel.random", "megatron.core.transformer.moe.moe_layer",
    "megatron.core.transformer.multi_latent_attention", "megatron.core.transformer.pipeline_parallel_layer_layout",
)
_FACTORIES = ("arange", "as_tensor", "empty", "empty_like", "full", "ones", "ones_like", "rand", "randn", "tensor", "zeros", "zeros_like")


class _Event:
    """CPU work is done when the call returns: events and streams have nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def wait(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class _Stream(_Event):
    def wait_stream(self, *args: Any) -> None: ...
    def wait_event(self, *args: Any) -> None: ...

    def record_event(self, *args: Any) -> _Event:
        return _Event()


class _View(types.ModuleType):
    """A module that answers with its own attributes first and the original's otherwise."""

    def __init__(self, original: types.ModuleType, **own: Any) -> None:
        super().__init__(original.__name__)
        self.__dict__.update(own, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A tensor factory that reads a CUDA device argument as the CPU and pins nothing."""

    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        device = kwargs.get("device")
        if isinstance(device, int) or (device is not None and torch.device(device).type == "cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return create


def _torch_view() -> _View:
    nothing: Callable[..., None] = lambda *args, **kwargs: None  # noqa: E731
    cuda = _View(
        torch.cuda, current_device=lambda: torch.device("cpu"), set_device=nothing, synchronize=nothing, empty_cache=nothing,
        Event=_Event, Stream=_Stream, current_stream=lambda *a, **k: _Stream(), default_stream=lambda *a, **k: _Stream(),
        stream=lambda stream: contextlib.nullcontext(), manual_seed=torch.manual_seed,
        get_rng_state=lambda *a, **k: torch.get_rng_state(), set_rng_state=lambda state, *a, **k: torch.set_rng_state(state),
    )
    return _View(torch, cuda=cuda, **{name: _on_cpu(getattr(torch, name)) for name in _FACTORIES})


def clip_grad_by_total_norm_fp32(parameters: Any, max_norm: float, total_norm: float, use_decoupled_grad: bool = False) -> None:
    """Scale gradients to `max_norm` (Megatron's own asserts the tensor type name 'torch.cuda.FloatTensor')."""
    coefficient = max_norm / (total_norm + 1.0e-6)
    if coefficient >= 1.0:
        return
    for parameter in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
        grad = parameter.decoupled_grad if use_decoupled_grad else parameter.grad
        if grad is not None:
            grad.mul_(coefficient)


@contextlib.contextmanager
def _tensor_cuda_is_identity() -> Iterator[None]:
    original = torch.Tensor.cuda
    torch.Tensor.cuda = lambda self, *a, **k: self  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.cuda = original  # type: ignore[method-assign]


def _setup_embeddings(original: Callable[..., None]) -> Callable[..., None]:
    """Tied embeddings under PP are made equal through `weight.data.cuda()`, a method call on a tensor that no view reaches."""

    def setup_embeddings_and_output_layer(self: Any) -> None:
        with _tensor_cuda_is_identity():
            original(self)

    return setup_embeddings_and_output_layer


def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron's own makes host arrays of CUDA tensors only, and all-to-all takes no tensors as split sizes."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def cut_positions(pos_emb: torch.Tensor, seq_dim: int, cp_group: Any) -> torch.Tensor:
    """Megatron's own sends its indices to the GPU by a method call on a pinned tensor, which no view reaches."""
    chunks = pos_emb.chunk(2 * cp_group.size(), seq_dim)
    return torch.cat([chunks[cp_group.rank()], chunks[-1 - cp_group.rank()]], seq_dim)


def _gather_uneven(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """gloo gathers equal sizes only; experts cut over tp send each other different numbers of tokens: padded to the largest."""

    def gather(input_: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return original(input_, group, output_split_sizes, use_global_buffer)
        sizes = [int(n) for n in output_split_sizes]
        padded = input_.new_zeros(max(sizes), *input_.shape[1:])
        padded[:len(input_)] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)])

    return gather


def _reduce_scatter_uneven(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same for the way back: summed whole, then cut."""

    def reduce_scatter(input_: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return original(input_, group, input_split_sizes, use_global_buffer)
        total = input_.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=group)
        return total.split([int(n) for n in input_split_sizes])[group.rank()].clone()

    return reduce_scatter


_REPLACEMENTS: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    # the random states behind the RNG tracker are the CPU generator's
    ("megatron.core.tensor_parallel.random", "_get_cuda_rng_state", lambda _: lambda *a, **k: torch.get_rng_state()),
    ("megatron.core.tensor_parallel.random", "_set_cuda_rng_state", lambda _: lambda state, *a, **k: torch.set_rng_state(state)),
    # asserts CUDA tensor type names; imported by name in optimizer.py too
    ("megatron.core.optimizer.clip_grads", "clip_grad_by_total_norm_fp32", lambda _: clip_grad_by_total_norm_fp32),
    ("megatron.core.optimizer.optimizer", "clip_grad_by_total_norm_fp32", lambda _: clip_grad_by_total_norm_fp32),
    ("megatron.core.models.common.language_module.language_module:LanguageModule", "setup_embeddings_and_output_layer", _setup_embeddings),
    # split sizes of the expert exchange; imported by name in token_dispatcher.py too
    ("megatron.core.transformer.moe.moe_utils", "maybe_move_tensor_to_cpu", lambda _: maybe_move_tensor_to_cpu),
    ("megatron.core.transformer.moe.token_dispatcher", "maybe_move_tensor_to_cpu", lambda _: maybe_move_tensor_to_cpu),
    # this rank's part of a table of positions; YaRN's embedding makes one already when it is built
    ("megatron.core.models.common.embeddings.yarn_rotary_pos_embedding", "get_pos_emb_on_this_cp_rank", lambda _: cut_positions),
    ("megatron.core.models.common.embeddings.rotary_pos_embedding", "get_pos_emb_on_this_cp_rank", lambda _: cut_positions),
    # exchanges of uneven sizes, which gloo lacks
    ("megatron.core.tensor_parallel.mappings", "_gather_along_first_dim", _gather_uneven),
    ("megatron.core.tensor_parallel.mappings", "_reduce_scatter_along_first_dim", _reduce_scatter_uneven),
    # its import of Transformer Engine's classes succeeds with None in their place, and isinstance(x, None) then fails
    ("megatron.core.transformer.multi_latent_attention", "HAVE_TE", lambda _: False),
)
# names that exist only with Transformer Engine, read without asking whether it is there
_ABSENT = (("megatron.core.transformer.moe.moe_utils", "te_general_gemm"),)


def name_cuda_types(parameters: Iterator[torch.nn.Parameter]) -> None:
    """Megatron's optimizers sort parameters by type *names* ('torch.cuda.FloatTensor'): let these parameters answer so."""
    for parameter in parameters:
        name = torch.Tensor.type(parameter).replace("torch.", "torch.cuda.", 1)
        parameter.type = lambda *a, _p=parameter, _n=name, **k: torch.Tensor.type(_p, *a, **k) if a or k else _n  # type: ignore[method-assign]


_adapted = False


def adapt() -> None:
    """Adapt the installed Megatron-Core, once per process. Raises UserError for a version that was not tested."""
    global _adapted
    if _adapted:
        return
    import megatron.core

    version = megatron.core.__version__
    if not version.startswith(TESTED_VERSIONS):
        raise UserError(f"megatron-core {version} has not been tested on the CPU; install one of: {', '.join(v + '.*' for v in TESTED_VERSIONS)}")
    with warnings.catch_warnings():  # it warns of every fast library that a CPU does without
        warnings.simplefilter("ignore")
        for name in _MODULES:
            importlib.import_module(name)
    for where, attribute, make in _REPLACEMENTS:
        module_name, _, owner = where.partition(":")
        target: Any = importlib.import_module(module_name)
        target = getattr(target, owner) if owner else target
        if not hasattr(target, attribute):
            raise UserError(f"megatron-core {version}: {where} has no {attribute}; the CPU adaptation does not fit this version")
        setattr(target, attribute, make(getattr(target, attribute)))
    for module_name, attribute in _ABSENT:
        vars(importlib.import_module(module_name)).setdefault(attribute, None)
    view = _torch_view()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = view  # type: ignore[attr-defined]
    # it reports each fork of the tracker as a fault when the states behind it are the CPU's
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    _adapted = True
