"""Classic TensorRT-LLM checkpoint directories (`config.json`, `rank{N}.safetensors`), written tensor by tensor: input of `trtllm-build`."""

from __future__ import annotations

import json
import logging
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from checkpoint.claim import Claim, claim
from checkpoint.files import replace_directory
from checkpoint.safetensors_format import Entry, file_size, make_header
from checkpoint.streaming import Assembler, Part
from parallel.errors import UserError
from parallel.families import FAMILIES
from parallel.model_config import ModelConfig, RopeScaling
from resharding.errors import WeightsError, listed
from resharding.layout import Layout, canonical_blocks
from resharding.layouts.trtllm_engine import EngineMapping, trtllm_engine_layout
from resharding.plan import Plan, make_plan

logger = logging.getLogger(__name__)

_FILES = re.compile(r"config\.json|rank\d+\.safetensors")  # only such files are ever replaced
DTYPES = ("bfloat16", "float16", "float32")
_RENORMALIZE, _NONE = 1, 0  # MoeConfig.ExpertScaleNormalizationMode


def engine_config(model: ModelConfig, mapping: EngineMapping, dtype: torch.dtype) -> dict[str, Any]:
    """`config.json` of the classic format (tensorrt_llm/models/{llama,qwen}/config.py). Raises UserError for what it cannot say."""
    mapping.check(model)
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise UserError(f"a classic TensorRT-LLM checkpoint in {name} is not supported; supported: {', '.join(DTYPES)}")
    if model.rope_scaling is not None and not isinstance(model.rope_scaling, RopeScaling):
        raise UserError(f"a classic TensorRT-LLM checkpoint of a {model.family} model cannot say rope scaling yarn; supported: none, llama3")
    if model.windowed_layers:
        logger.warning("a classic TensorRT-LLM checkpoint holds no sliding window: run the engine with max_attention_window_size %s",
                       model.sliding_window)
    out: dict[str, Any] = {
        "architecture": FAMILIES[model.family].architecture, "dtype": name, "logits_dtype": "float32", "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings, "hidden_size": model.hidden_size, "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers, "num_attention_heads": model.num_heads, "num_key_value_heads": model.num_kv_heads,
        "head_size": model.head_dim, "qk_layernorm": model.qk_norm, "hidden_act": "swiglu" if model.moe else "silu",
        "norm_epsilon": model.rms_norm_eps, "position_embedding_type": "rope_gpt_neox", "rotary_base": model.rope_theta,
        "rotary_scaling": _rotary_scaling(model.rope_scaling), "attn_bias": model.qkv_bias, "mlp_bias": False,
        "use_parallel_embedding": mapping.parallel_embedding, "embedding_sharding_dim": 0, "share_embedding_table": False,
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        "mapping": {"world_size": mapping.world_size, "tp_size": mapping.tp, "pp_size": mapping.pp, "moe_tp_size": mapping.expert_tp,
                    "moe_ep_size": mapping.expert_ep},
    }
    if model.family.startswith("qwen"):
        out.update(qwen_type=model.family, seq_length=8192, use_logn_attn=False)
    if model.moe is not None:
        out["moe"] = {"num_experts": model.moe.num_experts, "top_k": model.moe.top_k,
                      "normalization_mode": _RENORMALIZE if model.moe.normalize else _NONE, "sparse_mixer_epsilon": 0.01, "tp_mode": 0}
        out["moe_intermediate_size"] = model.moe.intermediate_size
        if model.moe.shared_intermediate_size:
            out["moe"]["shared_expert_intermediate_size"] = out["moe_shared_expert_intermediate_size"] = model.moe.shared_intermediate_size
    return out


def _rotary_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    return {"type": "llama3", "rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor, "original_max_position_embeddings": scaling.original_max_position_embeddings}


def engine_layouts(model: ModelConfig, mapping: EngineMapping, dtype: torch.dtype) -> tuple[Layout, ...]:
    """The layout of every rank's file."""
    return tuple(trtllm_engine_layout(model, mapping.tp, mapping.pp, rank, dtype, mapping.moe_tp, mapping.moe_ep, mapping.parallel_embedding)
                 for rank in range(mapping.world_size))


def check_writable(directory: Path, overwrite: bool) -> None:
    """Raise UserError where `directory` holds something: anything without `overwrite`, else anything but such a checkpoint."""
    if blocking := next((p for p in (directory, *directory.parents) if p.exists() and not p.is_dir()), None):
        raise UserError(f"output directory {str(directory)!r} cannot be made: {str(blocking)!r} is a file; give another directory")
    held = sorted(p.name for p in directory.iterdir()) if directory.is_dir() else []
    if held and not overwrite:
        raise UserError(f"output directory {str(directory)!r} is not empty; give another one, or allow overwriting with --overwrite")
    if foreign := [name for name in held if not _FILES.fullmatch(name)]:
        raise UserError(f"output directory {str(directory)!r} holds {listed(foreign, 4)}, not part of a TensorRT-LLM checkpoint; nothing is "
                        "overwritten there: choose another directory")


class EngineWriter:
    """Writes all ranks' files, tensors in any order. A context manager: left without an error, the whole directory appears at
    once, else nothing does. Entering raises UserError where another process is writing it; what a killed one left is removed.

        with EngineWriter(directory, model, EngineMapping(tp=2), torch.bfloat16) as writer:
            for layout in writer.layouts: ... writer.write(layout.rank, name, tensor)
    """

    def __init__(self, directory: str | Path, model: ModelConfig, mapping: EngineMapping, dtype: torch.dtype, overwrite: bool = False) -> None:
        """Raises UserError where the model cannot be written in this format, or the directory holds something (see check_writable)."""
        self._target = Path(directory).absolute()
        self._config = engine_config(model, mapping, dtype)
        self.layouts = engine_layouts(model, mapping, dtype)
        check_writable(self._target, overwrite)
        self._overwrite = overwrite
        self._claim: Claim | None = None
        self._files: dict[int, tuple[int, dict[str, Entry]]] = {}  # rank -> descriptor, places
        self._written: dict[tuple[int, str], list[range]] = defaultdict(list)  # (rank, tensor) -> rows

    def __enter__(self) -> EngineWriter:
        try:
            self._claim = claim(self._target)
            check_writable(self._target, self._overwrite)  # again: now nobody else writes it
            for layout in self.layouts:
                head, places = make_header((t.name, t.shape, t.dtype) for t in layout.tensors)
                handle = os.open(self._claim.temporary / f"rank{layout.rank}.safetensors", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
                self._files[layout.rank] = handle, places
                os.ftruncate(handle, file_size(head, places))
                _write_at(handle, head, 0)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def write(self, rank: int, name: str, tensor: torch.Tensor, first_row: int | None = None) -> None:
        """Write one tensor of one rank, or those of its rows (places along dimension 0) that begin at `first_row`.

        Raises WeightsError where it is unknown, misshapen, of another dtype, or written already.
        """
        handle, places = self._files[rank]
        if (entry := places.get(name)) is None:
            raise WeightsError(f"rank {rank}: {name} is no tensor of the checkpoint")
        shape = entry.shape if first_row is None else (tensor.shape[0], *entry.shape[1:])
        rows = range(first_row or 0, (first_row or 0) + shape[0])
        if tuple(tensor.shape) != shape or tensor.dtype != entry.dtype or rows.stop > entry.shape[0]:
            raise WeightsError(f"rank {rank}: {name} is {tuple(tensor.shape)} {tensor.dtype} from row {rows.start} on, the checkpoint has "
                               f"{entry.shape} {entry.dtype}")
        if any(rows.start < other.stop and other.start < rows.stop for other in self._written[rank, name]):
            raise WeightsError(f"rank {rank}: {name} is written already")
        _write_at(handle, tensor.detach().cpu().contiguous().view(torch.uint8).flatten().numpy(),
                  entry.start + rows.start * ((entry.stop - entry.start) // entry.shape[0]))
        self._written[rank, name].append(rows)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            for handle, _ in self._files.values():
                os.close(handle)
            if kind is None and self._claim is not None:
                self._publish(self._claim.temporary)
        finally:
            if self._claim is not None:
                self._claim.release()

    def _publish(self, temporary: Path) -> None:
        left = [f"{t.name} (rank {x.rank})" for x in self.layouts for t in x.tensors if sum(map(len, self._written[x.rank, t.name])) < t.shape[0]]
        if left:
            raise WeightsError(f"{str(self._target)!r} is not written: {len(left)} tensors are missing: {listed(left)}")
        (temporary / "config.json").write_text(json.dumps(self._config, indent=2) + "\n")
        replace_directory(temporary, self._target)


def _write_at(handle: int, data: Any, offset: int) -> None:
    view = memoryview(data)
    while len(view):
        written = os.pwrite(handle, view, offset)
        view, offset = view[written:], offset + written


def write_engine(directory: str | Path, reader: Mapping[str, Any], source: Layout, model: ModelConfig, mapping: EngineMapping,
                 dtype: torch.dtype, overwrite: bool = False, report: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Write `reader`'s tensors (a tensor, or anything that gives one when sliced, by name in the `source` layout) as an engine checkpoint.

    One tensor, or one expert of one, is in memory at a time. `report` is told (bytes done, bytes in all). Raises as EngineWriter
    does, and CoverageError where the source does not hold the whole model.
    """
    with EngineWriter(directory, model, mapping, dtype, overwrite) as writer:
        total, done = sum(layout.nbytes for layout in writer.layouts), 0
        for rank, part, values in _parts(writer.layouts, reader, source, model):
            writer.write(rank, part.local.name, values, part.box[0][0])
            done += part.nbytes
            report(done, total)


def _parts(layouts: tuple[Layout, ...], reader: Mapping[str, Any], source: Layout, model: ModelConfig) -> Iterator[tuple[int, Part, torch.Tensor]]:
    """Every tensor of every rank, made one at a time; stacked experts one by one."""
    plan = make_plan([source], list(layouts), canonical_blocks(model), source_is_everywhere=True)
    for layout in layouts:
        copies, paddings = (tuple(x for x in found if rank_of(x) == layout.rank)
                            for found, rank_of in ((plan.copies, lambda c: c.dst_rank), (plan.paddings, lambda p: p.rank)))
        assembler = Assembler(Plan(copies, paddings, layout.rank), reader)
        for local in layout.tensors:
            stacked = any(piece.view.index for piece in local.pieces)
            rest = tuple((0, n) for n in local.shape[1:])
            for part in [Part(local, ((i, i + 1), *rest)) for i in range(local.shape[0])] if stacked else [Part.whole(local)]:
                yield layout.rank, part, assembler.values(part)


def verify_engine(directory: str | Path, reader: Mapping[str, Any], source: Layout, model: ModelConfig, mapping: EngineMapping,
                  dtype: torch.dtype) -> None:
    """Read an engine checkpoint back and compare every byte with what the source gives. Raises WeightsError that names what differs."""
    from safetensors import safe_open

    path = Path(directory)
    if json.loads((path / "config.json").read_text()) != engine_config(model, mapping, dtype):
        raise WeightsError(f"{path / 'config.json'} is not that of the model with these sizes; write the checkpoint again")
    layouts = engine_layouts(model, mapping, dtype)
    files = {layout.rank: safe_open(path / f"rank{layout.rank}.safetensors", framework="pt") for layout in layouts}
    for layout in layouts:
        if wrong := sorted(set(files[layout.rank].keys()) ^ set(layout.by_name)):
            raise WeightsError(f"{path}: rank {layout.rank} lacks, or has too many: {listed(wrong)}; write the checkpoint again")
    for rank, part, expected in _parts(layouts, reader, source, model):
        found = files[rank].get_slice(part.local.name)
        values = found[slice(*part.box[0])]
        if tuple(found.get_shape()) != part.local.shape or values.dtype != expected.dtype or not torch.equal(_bits(values), _bits(expected)):
            raise WeightsError(f"{path}: {part.local.name} of rank {rank} is not what was written; write the checkpoint again")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
