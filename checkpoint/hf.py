"""Reading and writing Hugging Face directories: a plan between the `hf` layout and the layout at hand, over safetensors."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from checkpoint.hf_config import write_companions
from parallel.errors import UserError
from parallel.model_config import ModelConfig
from resharding.agreement import together
from resharding.checksum import piece_checksums, verify
from resharding.errors import WeightsError, listed
from resharding.layout import Layout, canonical_shapes, check_tensors, empty_tensors
from resharding.layouts import hf_layout
from resharding.plan import make_plan
from resharding.transport import in_place, point_to_point

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = ("F64", "F32", "F16", "BF16")
HARMLESS = ("rotary_emb.inv_freq",)  # buffers that old exports carry; they are recomputed from the config
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
COMPARE_ROWS = 8192

# what a Hugging Face model directory is made of; only such files are ever replaced
_MODEL_FILES = re.compile(r"(config|generation_config|tokenizer\w*|special_tokens_map|added_tokens|vocab|chat_template|preprocessor_config)\.json"
                          r"|model.*\.safetensors(\.index\.json)?|merges\.txt|tokenizer\.model|chat_template\.jinja|additional_chat_templates"
                          r"|LICENSE.*|README\.md|NOTICE.*")


class HFFiles(Mapping[str, Any]):
    """The tensors of a HF directory by name, as safetensors slices: only what is sliced out is read. A context manager."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._open = ExitStack()
        self._handles: dict[str, Any] = {}
        self._file_of = self._find()

    def _find(self) -> dict[str, str]:
        if not self.directory.is_dir():
            raise UserError(f"model directory {str(self.directory)!r} does not exist; give a directory with config.json and *.safetensors")
        if (self.directory / INDEX).is_file():
            try:
                weight_map: dict[str, str] = json.loads((self.directory / INDEX).read_text())["weight_map"]
            except (json.JSONDecodeError, KeyError) as error:
                raise UserError(f"{self.directory / INDEX} is not a safetensors index: {error!r}; download the directory again") from None
            absent = sorted({f for f in weight_map.values() if not (self.directory / f).is_file()})
            if absent:
                raise UserError(f"model directory {str(self.directory)!r} lacks the shards {listed(absent)} that {INDEX} names; "
                                "download them")
            return {name: file for name, file in weight_map.items() if name in self._handle(file).keys()}
        files = [SINGLE] if (self.directory / SINGLE).is_file() else sorted(p.name for p in self.directory.glob("*.safetensors"))
        if not files:
            raise UserError(f"model directory {str(self.directory)!r} holds no *.safetensors file; weights in other formats are not read")
        if len(files) > 1:
            raise UserError(f"model directory {str(self.directory)!r} holds {len(files)} safetensors files ({listed(files)}) and no "
                            f"{INDEX}; add the index")
        return dict.fromkeys(self._handle(files[0]).keys(), files[0])

    def _handle(self, file: str) -> Any:
        if file not in self._handles:
            path = self.directory / file
            try:
                self._handles[file] = self._open.enter_context(safe_open(path, framework="pt"))
            except Exception as error:  # the reader has an exception type of its own
                raise UserError(f"{path} cannot be read as safetensors: {error}; download it again") from None
        return self._handles[file]

    def __getitem__(self, name: str) -> Any:
        return self._handle(self._file_of[name]).get_slice(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def __enter__(self) -> HFFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        self._handles.clear()
        self._open.close()


def read_hf(directory: str | Path, layout: Layout, tensors: Mapping[str, torch.Tensor], model: ModelConfig) -> None:
    """Fill the local `tensors` of `layout` from a HF directory, reading only the slices they need, cast to their dtype.

    Raises UserError that names the tensors where the directory lacks one, holds one of another shape or dtype kind, or holds
    one that the model does not know. A tied model whose files carry an `lm_head.weight` uses the embedding, as its config
    says, and a warning is logged where the two differ.
    """
    check_tensors(layout, tensors)
    shapes = canonical_shapes(model)
    with HFFiles(directory) as files:
        _check_files(files, shapes, model)
        plan = make_plan([hf_layout(model, torch.float32)], [layout], shapes, source_is_everywhere=True, read_all=False)
        in_place.execute(plan, files, tensors, layout.rank)


def _check_files(files: HFFiles, shapes: Mapping[str, tuple[int, ...]], model: ModelConfig) -> None:
    where = f"model directory {str(files.directory)!r}"
    if missing := [name for name in shapes if name not in files]:
        hint = "; config.json says tie_word_embeddings false, so the head must be in the files: set it to true if the model ties it" \
            if HEAD in missing else ""
        raise UserError(f"{where} lacks {len(missing)} tensors of its config ({model.family}): {listed(missing)}{hint}")
    known = set(shapes) | ({HEAD} if model.tied else set())
    if extra := [name for name in files if name not in known and not name.endswith(HARMLESS)]:
        raise UserError(f"{where} holds {len(extra)} tensors that a {model.family} model with its config does not have: {listed(extra)}; "
                        "check model_type, num_hidden_layers and the bias options in config.json")
    for name, shape in shapes.items():
        part = files[name]
        if tuple(part.get_shape()) != shape:
            raise UserError(f"{where}: {name} has shape {tuple(part.get_shape())}, config.json asks for {shape}; one of the two is wrong")
        if part.get_dtype() not in FLOATS:
            raise UserError(f"{where}: {name} has dtype {part.get_dtype()}; supported: {', '.join(FLOATS)}")
    if model.tied and HEAD in files and not _same(files[HEAD], files[EMBEDDING]):
        logger.warning("%s: %s differs from %s although config.json ties them; using %s", where, HEAD, EMBEDDING, EMBEDDING)


def _same(a: Any, b: Any) -> bool:
    if a.get_shape() != b.get_shape():
        return False
    steps = range(0, a.get_shape()[0], COMPARE_ROWS)
    return all(torch.equal(a[i:i + COMPARE_ROWS], b[i:i + COMPARE_ROWS]) for i in steps)


def check_writable(directory: str | Path, overwrite: bool = False) -> None:
    """Raise UserError where `directory` cannot be made, or holds something: anything without `overwrite`, else anything but a model.

    Overwriting replaces a Hugging Face model directory as a whole, and never a file that is not part of one.
    """
    path = Path(directory).absolute()
    blocking = next((p for p in (path, *path.parents) if p.exists() and not p.is_dir()), None)
    if blocking is not None:
        raise UserError(f"output directory {str(directory)!r} cannot be made: {str(blocking)!r} is a file; give another directory")
    held = sorted(p.name for p in path.iterdir()) if path.is_dir() else []
    if held and not overwrite:
        raise UserError(f"output directory {str(directory)!r} is not empty; choose another or allow overwriting")
    foreign = [name for name in held if not _MODEL_FILES.fullmatch(name)]
    if foreign:
        raise UserError(f"output directory {str(directory)!r} holds {', '.join(foreign[:4])}, not part of a Hugging Face model; nothing is "
                        "overwritten there: choose another directory")


def write_hf(directory: str | Path, tensors: Mapping[str, torch.Tensor], model: ModelConfig, source: str | Path | None = None,
             shard_bytes: int = 5 << 30, overwrite: bool = False) -> None:
    """Write canonical `tensors` (name to full tensor) as a HF directory that transformers loads.

    Weights go to `model.safetensors`, or to shards of at most `shard_bytes` with an index. `source` is a directory to copy
    tokenizer and generation files from. Written to a sibling and renamed: the directory is whole or absent. Raises UserError
    where it exists and is not empty (unless `overwrite`), WeightsError where tensors are missing, unknown or misshapen.
    """
    check_writable(directory, overwrite)
    shapes = canonical_shapes(model)
    if wrong := sorted(set(shapes) ^ set(tensors)):
        raise WeightsError(f"cannot write {str(directory)!r}: missing or unknown tensors {listed(wrong)}")
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise WeightsError(f"cannot write {str(directory)!r}: {name} has shape {tuple(tensors[name].shape)}, the model has {shape}")
    target = Path(directory).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        write_companions(temporary, model, str(tensors[EMBEDDING].dtype).removeprefix("torch."), source)
        _write_weights(temporary, {name: tensors[name] for name in shapes}, shard_bytes)
        _publish(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_weights(directory: Path, tensors: dict[str, torch.Tensor], shard_bytes: int) -> None:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensor.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += tensor.nbytes
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: tensors[name].detach().cpu().contiguous() for name in names}, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")


def _publish(temporary: Path, target: Path) -> None:
    """Put the finished directory in its place: files on disk first, then one rename."""
    for path in [*temporary.iterdir(), temporary]:
        _sync_to_disk(path)
    old = target.with_name(f".{target.name}.old-{os.getpid()}")
    replaced = target.is_dir() and any(target.iterdir())
    if replaced:
        target.rename(old)
    temporary.rename(target)
    _sync_to_disk(target.parent)
    if replaced:
        shutil.rmtree(old)


def _sync_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def export_hf(directory: str | Path, source_layouts: Sequence[Layout], source_tensors: Mapping[str, torch.Tensor], model: ModelConfig,
              dtype: torch.dtype, source: str | Path | None = None, rank: int = 0, group: dist.ProcessGroup | None = None,
              overwrite: bool = False) -> None:
    """Collective over `group`: gather the weights on its first rank, check them, and write a HF directory in `dtype` there.

    Raises on every rank where any fails. WeightsError: replicas (tied copies, data-parallel ranks) differ, or what arrived is
    not what was sent. UserError: the directory cannot be written.
    SyncError: anything else.
    """
    writer = dist.get_global_rank(group, 0) if group is not None else 0
    what = f"export to {str(directory)!r}"
    destination = hf_layout(model, dtype, writer)
    mine = next((layout for layout in source_layouts if layout.rank == rank), None)
    plan = make_plan(source_layouts, [destination], canonical_shapes(model))
    gathered: dict[str, torch.Tensor] = {}
    with together(what, group):
        if mine is not None:
            check_tensors(mine, source_tensors)
        if rank == writer:
            check_writable(directory, overwrite)
            gathered = empty_tensors(destination, next((t.device for t in source_tensors.values()), torch.device("cpu")))
    with together(what, group) as step:
        point_to_point.execute(plan, source_tensors, gathered, rank, group)
        step.payload = (rank, piece_checksums(mine, source_tensors, dtype) if mine is not None else [])
    by_rank = dict(step.payloads)
    expected = verify(source_layouts, [by_rank[layout.rank] for layout in source_layouts])
    with together(what, group):
        if rank == writer:
            verify([destination], [piece_checksums(destination, gathered)], expected)
            write_hf(directory, gathered, model, source, overwrite=overwrite)


