"""Between model directories, in one process or shared by ranks, without building a model: a plan from files to files, streamed.

    hf:DIR           Hugging Face: safetensors
    mcore:DIR        Megatron-Core's distributed format: ours (`checkpoint.mcore`), Megatron-LM's or Megatron-Bridge's
    trtllm-engine:DIR  TensorRT-LLM's classic checkpoints (written only)
"""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from checkpoint import megatron_lm
from checkpoint.files import find_size_damage, read_manifest
from checkpoint.hf_files import HFFiles
from checkpoint.hf_writer import HFWriter
from checkpoint.mcore import describe_weights, is_model_directory, model_config_of, weights_of
from checkpoint.mcore_files import check_files
from checkpoint.publish import whole_directory
from checkpoint.streaming import Assembler, Part, keeping_dtypes, share_of, stored_dtypes
from checkpoint.together import catchable, on_rank_zero, raise_together, rank, world_size
from checkpoint.torch_dist import TorchDistFiles
from checkpoint.torch_dist_writer import FILE_BYTES, TorchDistWriter
from parallel.config import ParallelConfig
from parallel.errors import UserError
from parallel.model_config import ModelConfig
from resharding.agreement import together
from resharding.errors import WeightsError, listed
from resharding.layout import Layout, LocalTensor, canonical_blocks, canonical_shapes, check_tensors
from resharding.layouts import hf_layout
from resharding.layouts.mcore_files import StoredTensor, extra_states, mcore_files
from resharding.plan import make_plan

FORMS = ("mcore-rl", "megatron-lm", "megatron-bridge")
Report = Callable[[int, int], None]  # (bytes done, bytes in all) of this rank


def silent(done: int, total: int) -> None:
    """Reports nothing."""


@dataclass(frozen=True)
class Source:
    """An open model directory: its files by name, the layout of what is in them, and where config and tokenizer are."""

    directory: Path
    model: ModelConfig
    layout: Layout
    files: Mapping[str, Any]
    companions: Path | None

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of most of its bytes."""
        sizes: Counter[torch.dtype] = Counter()
        for name, shape in canonical_shapes(self.model).items():
            sizes[self.dtypes[name]] += torch.Size(shape).numel() * self.dtypes[name].itemsize
        return sizes.most_common(1)[0][0]

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of every canonical tensor; FP8 is read as the model's."""
        return stored_dtypes(self.layout, getattr(torch, self.model.dtype))


@contextlib.contextmanager
def open_model(kind: str, directory: str | Path, hf_config: str | Path | None = None, without_mtp: bool = False) -> Iterator[Source]:
    """Open `hf` or `mcore` and check that its files hold exactly the model that its config describes.

    `hf_config`: a directory with config.json, for Megatron checkpoints that do not say enough of the model. Raises UserError
    for what is half written, damaged, or contradicts its config; tensors are named.
    """
    path = Path(directory)
    if kind == "hf":
        model = ModelConfig.from_directory(path)
        with HFFiles(path) as files:
            yield Source(path, model, files.check(model, without_mtp), files, path)
        return
    model, weights, companions, said_by = _find(path, Path(hf_config) if hf_config else None)
    with TorchDistFiles(weights) as stored:
        yield Source(path, model, check_files(stored, model, without_mtp, said_by), stored, companions)


def _find(path: Path, hf_config: Path | None) -> tuple[ModelConfig, Path, Path | None, str]:
    """The model, where its weights and companions are, and the name of the file that describes it."""
    if is_model_directory(path):
        _refuse_damage(path)
        model = model_config_of(path)
        return model, weights_of(path), path / "hf", "config.json"
    found = megatron_lm.find(path) if path.is_dir() else None
    if found is None:
        raise UserError(f"{str(path)!r} is no model in Megatron's format: it holds neither metadata.json of `mcore-rl convert`, nor "
                        f"{megatron_lm.TRACKER}, nor .metadata" if path.is_dir() else f"checkpoint {str(path)!r} does not exist")
    _refuse_damage(path)
    return megatron_lm.read_model(found, hf_config), found.weights, found.companions or hf_config, megatron_lm.described_in(found, hf_config)


def _refuse_damage(path: Path) -> None:
    """Compare files with the manifest, where there is one."""
    manifest = read_manifest(path) if (path / "manifest.json").exists() or is_model_directory(path) else {"files": {}}
    damage = manifest if isinstance(manifest, str) else find_size_damage(path, manifest["files"])
    if damage:
        raise UserError(f"checkpoint {str(path)!r} is not complete: {damage}; give one that was written whole")


def check_destination(directory: Path, overwrite: bool) -> None:
    """Raise UserError where a Megatron checkpoint cannot be written: over anything without `overwrite`, else over anything but such a one."""
    blocking = next((p for p in (directory.absolute(), *directory.absolute().parents) if p.exists() and not p.is_dir()), None)
    if blocking is not None:
        raise UserError(f"output directory {str(directory)!r} cannot be made: {str(blocking)!r} is a file; give another directory")
    if not directory.exists() or not any(directory.iterdir()):
        return
    if not overwrite:
        raise UserError(f"output directory {str(directory)!r} exists and is not empty; give another one, or allow overwriting with --overwrite")
    held = {p.name for p in directory.iterdir()}
    ours = is_model_directory(directory) and held <= {"weights", "hf", "metadata.json", "manifest.json"}
    if not ours and not megatron_lm.is_ours(directory):
        raise UserError(f"output directory {str(directory)!r} holds {listed(sorted(held), 4)}, not (only) a converted model; nothing is overwritten "
                        "there: choose another directory")


def write_mcore(source: Source, directory: str | Path, parallel: ParallelConfig = ParallelConfig(), dtype: torch.dtype | None = None,
                form: str = "mcore-rl", overwrite: bool = False, divisible_by: int | None = None, file_bytes: int = FILE_BYTES,
                report: Report = silent) -> None:
    """Collective: write a Megatron checkpoint, in chunks and with a vocabulary padded as ranks of `parallel` would have them.

    `dtype` None keeps the source's. `form` is whose directory it becomes: see FORMS. Raises UserError where it cannot be
    written; then, and after an interrupt, nothing is left of it.
    """
    target = Path(directory)
    if source.model.head == "value" and form != "mcore-rl":
        raise UserError(f"{str(source.directory)!r} is a value model (score.weight); {form} directories hold causal language "
                        "models: leave --format out")
    on_rank_zero(lambda: check_destination(target, overwrite), f"writing {target}")
    model = source.model.with_options(make_vocab_size_divisible_by=divisible_by or source.model.make_vocab_size_divisible_by)
    stored = _stored(source, model, parallel, dtype)
    name = str(dtype or source.dtype).removeprefix("torch.")
    crcs: dict[str, tuple[int, int]] = {}
    with _published(target, crcs) as temporary:
        weights = temporary / megatron_lm.weights_folder(form)
        on_rank_zero(lambda: weights.mkdir(parents=True, exist_ok=True), f"writing {target}")
        writer = TorchDistWriter(weights, file_bytes)
        try:
            parts = [Part(s.tensor, box) for s in stored for box in s.chunks()]
            _stream(source, Layout("mcore_files", 0, tuple(s.tensor for s in stored)), parts,
                    lambda part, made: writer.write(part.local.name, part.box, part.local.dtype, (values for _, values in made.blocks(part))),
                    report, f"writing {target}")
            writer.close({s.tensor.name: s.tensor for s in stored}, extra_states(model),
                         megatron_lm.common_state(form, model.with_options(dtype=name), parallel))
        finally:
            writer.abandon()
        crcs.update({f"{weights.name}/{file}": entry for file, entry in writer.crcs.items()})
        if form == "mcore-rl":
            on_rank_zero(lambda: describe_weights(temporary, model, name, source.companions), f"writing {target}")
        else:
            on_rank_zero(lambda: megatron_lm.describe(temporary, form, model.with_options(dtype=name), parallel, name, source.companions),
                         f"writing {target}")


def _stored(source: Source, model: ModelConfig, parallel: ParallelConfig, dtype: torch.dtype | None) -> list[StoredTensor]:
    stored = mcore_files(model, dtype or source.dtype, parallel)
    if dtype is not None:
        return list(stored)
    return [StoredTensor(keeping_dtypes(s.tensor, source.dtypes), s.cuts) for s in stored]


@contextlib.contextmanager
def _published(target: Path, crcs: dict[str, tuple[int, int]]) -> Iterator[Path]:
    """`whole_directory`, of which an interrupt leaves nothing either."""
    with whole_directory(target, known=crcs) as temporary:
        try:
            yield temporary
        except catchable():
            raise
        except BaseException:
            if rank() == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise


def write_hf(source: Source, directory: str | Path, dtype: torch.dtype | None = None, overwrite: bool = False,
             shard_bytes: int = 5 << 30, report: Report = silent) -> None:
    """Collective: write a Hugging Face directory. `dtype` None keeps the source's. Raises as `HFWriter` does."""
    layout = hf_layout(source.model, dtype or source.dtype)
    if dtype is None:
        layout = Layout("hf", 0, tuple(keeping_dtypes(local, source.dtypes) for local in layout.tensors))
    with HFWriter(directory, layout, source.model, dtype or source.dtype, source.companions, shard_bytes, overwrite, shared=world_size() > 1) as writer:
        def write(part: Part, made: Assembler) -> None:
            for block, values in made.blocks(part, rows_only=True):
                writer.write(part.local.name, values, block.box[0] if block.box else None)

        _stream(source, layout, [Part.whole(local) for local in layout.tensors], write, report, f"writing {directory}")


def _stream(source: Source, layout: Layout, parts: list[Part], write: Callable[[Part, Assembler], None], report: Report, doing: str) -> None:
    """Make and write this rank's share of the parts; an error on one rank is raised on all."""
    error: BaseException | None = None
    try:
        plan = make_plan([source.layout], [layout], canonical_shapes(source.model), source_is_everywhere=True)
        assembler = Assembler(plan, source.files)
        mine = share_of(assembler.in_order(parts, source.layout), rank(), world_size())
        total, done = sum(part.nbytes for part in mine), 0
        for part in mine:
            write(part, assembler)
            done += part.nbytes
            report(done, total)
    except catchable() as caught:
        error = caught
    raise_together(error, doing)


def fill(source: Source, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill the local `tensors` of a rank's `layout` from a source, tensor by tensor, reading only what they need, cast to their dtypes."""
    check_tensors(layout, tensors)
    assembler = Assembler(make_plan([source.layout], [layout], canonical_blocks(source.model), source_is_everywhere=True, read_all=False), source.files)
    for part in assembler.in_order([Part.whole(local) for local in layout.tensors], source.layout):
        tensors[part.local.name].copy_(assembler.values(part))


def verify(source: Source, written: Source, report: Report = silent) -> None:
    """Collective: read both models tensor by tensor and compare bit for bit, the source cast to what was written.

    Nothing of the write is used again: the written directory is opened, described and planned from anew. Raises WeightsError
    that names tensors which differ.
    """
    shapes = canonical_shapes(source.model)
    if shapes != canonical_shapes(written.model):
        raise WeightsError(f"{written.directory} describes another model than {source.directory}")
    dtypes = written.dtypes
    layout = Layout("canonical", 0, tuple(
        LocalTensor(t.name, t.shape, dtypes[t.name], t.pieces) for t in hf_layout(source.model, torch.float32, experts="split").tensors))
    want, have = (Assembler(make_plan([s.layout], [layout], shapes, source_is_everywhere=True), s.files) for s in (source, written))
    mine = share_of(have.in_order([Part.whole(t) for t in layout.tensors], written.layout), rank(), world_size())
    total, done, different = sum(part.nbytes for part in mine), 0, []
    with together(f"verifying {str(written.directory)!r}"):
        for part in mine:
            if any(not torch.equal(_bits(a), _bits(b)) for (_, a), (_, b) in zip(want.blocks(part), have.blocks(part), strict=True)):
                different.append(part.local.name)
            done += part.nbytes
            report(done, total)
        if different:
            raise WeightsError(f"it differs from {str(source.directory)!r} in {listed(different)}")


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1).view(torch.uint8)
