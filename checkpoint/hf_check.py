"""Whether the files of a Hugging Face directory hold exactly the model of its config.json; what is wrong is named."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from parallel.errors import UserError
from parallel.model_config import ModelConfig
from resharding.errors import listed
from resharding.fp8 import E4M3, SUFFIX, check_scale
from resharding.layout import Layout, LocalTensor

if TYPE_CHECKING:
    from checkpoint.hf_files import HFFiles

logger = logging.getLogger(__name__)

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
HARMLESS = ("rotary_emb.inv_freq",)  # buffers that old exports carry; they are recomputed from the config
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
VALUE_HEAD = "score.weight"  # of transformers' *ForSequenceClassification; the others are TRL's, and those of critics that other programs wrote
VALUE_HEAD_ALIASES = ("v_head.summary.weight", "v_head.weight", "value_head.weight")
COMPARE_ROWS = 8192
_NUMBERED = re.compile(r"\.(layers|experts)\.(\d+)\.")


def check(files: HFFiles, model: ModelConfig, without_mtp: bool = False) -> Layout:
    """The layout of the files: see `HFFiles.check`. Raises UserError that names tensors which are missing, unknown or misshapen.

    A tied model whose files carry an `lm_head.weight` uses the embedding, as its config says; a warning is logged where the two
    differ. Layers for multi-token prediction are refused unless `without_mtp` leaves them out, with a warning.
    """
    where = f"model directory {str(files.directory)!r}"
    layout = files.layout(model)
    _refuse_packed(files, where)
    _check_declared(files, where)
    contradictions = _contradictions(files, model)
    if missing := [local.name for local in layout.tensors if local.name not in files.entries]:
        hint = "; config.json says tie_word_embeddings false, so the head must be in the files: set it to true if the model ties it" \
            if HEAD in missing else ""
        raise UserError(f"{where} lacks {len(missing)} tensors of its config ({model.family}): {listed(missing)}{hint}{contradictions}")
    known = {local.name for local in layout.tensors} | ({HEAD} if model.tied else set()) | _beside_a_value_head(files, model, where)
    extra = [name for name in files if name not in known and not name.endswith(HARMLESS)]
    extra = _without_mtp(extra, model, where, without_mtp)
    if extra:
        raise UserError(f"{where} holds {len(extra)} tensors that a {model.family} model with its config does not have: {listed(extra)}; "
                        f"check model_type, num_hidden_layers and the bias options in config.json{contradictions}")
    for local in layout.tensors:
        _check_tensor(files, local, where)
    if model.tied and HEAD in files and not _same(files[HEAD], files[EMBEDDING]):
        logger.warning("%s: %s differs from %s although config.json ties them; using %s", where, HEAD, EMBEDDING, EMBEDDING)
    return layout


def _beside_a_value_head(files: HFFiles, model: ModelConfig, where: str) -> set[str]:
    """What a value model's directory may hold and is not used: a head over the vocabulary, and a bias of zero."""
    if model.head != "value":
        return set()
    biases = [name for name in files if name in {n.removesuffix("weight") + "bias" for n in (VALUE_HEAD, *VALUE_HEAD_ALIASES)}]
    for name in biases:
        if files[name].any():
            raise UserError(f"{where}: {name}, the bias of the value head, is not zero, and value heads have no bias here; "
                            "subtract it from the rewards and remove the tensor, or train a head without one")
    if HEAD in files:
        logger.info("%s: %s is not read; the model has a value head", where, HEAD)
    return {HEAD, *biases}


def _refuse_packed(files: HFFiles, where: str) -> None:
    """MXFP4 experts (gpt_oss), whatever config.json says of them."""
    if packed := [name for name in files if name.endswith(("_proj_blocks", "_proj_scales"))]:
        raise UserError(f"{where} holds its experts in MXFP4 ({listed(packed, 2)}), which is not read; dequantise it to bf16 first, e.g. load it "
                        "in transformers with Mxfp4Config(dequantize=True) and save_pretrained")


def _check_declared(files: HFFiles, where: str) -> None:
    """FP8 is in the files and in config.json, or in neither."""
    codes = [name for name, (_, entry) in files.entries.items() if entry.dtype == E4M3]
    if files.quantization is not None and not codes:
        raise UserError(f"{where}: config.json has a quantization_config of block FP8, but no tensor is FP8 (F8_E4M3): the config contradicts the "
                        "files; remove it where the weights were dequantised, else download the directory again")
    if files.quantization is None and codes:
        raise UserError(f"{where}: {len(codes)} tensors are FP8 (F8_E4M3), but config.json has no quantization_config with weight_block_size: the config "
                        f"contradicts the files; add it: {listed(codes)}")


def _contradictions(files: HFFiles, model: ModelConfig) -> str:
    """Numbers of layers and experts in the files, where they are not those of config.json."""
    highest = {"layers": -1, "experts": -1}
    for name in files:
        for kind, number in _NUMBERED.findall(name):
            highest[kind] = max(highest[kind], int(number))
    expected = {"layers": model.num_layers, "experts": model.moe.num_experts if model.moe else 0}
    return "".join(f"; the files hold {highest[kind] + 1} {kind}, config.json says {count}"
                   for kind, count in expected.items() if highest[kind] >= 0 and highest[kind] + 1 != count)


def _without_mtp(extra: list[str], model: ModelConfig, where: str, without_mtp: bool) -> list[str]:
    """`extra` without the tensors of layers for multi-token prediction, which come after the model's own."""
    count = int(model.hf.get("num_nextn_predict_layers") or model.hf.get("num_mtp_layers") or 0)
    prefixes = tuple(f"model.layers.{model.num_layers + i}." for i in range(count))
    found = [name for name in extra if name.startswith(prefixes)] if prefixes else []
    if not found:
        return extra
    layers = ", ".join(f"{prefix}*" for prefix in prefixes)
    if not without_mtp:
        raise UserError(f"{where} holds layers for multi-token prediction ({layers}; num_nextn_predict_layers {count}), which are not built; "
                        "leave them out: mcore-rl convert --without-mtp")
    logger.warning("%s: the layers for multi-token prediction (%s, %d tensors) are left out", where, layers, len(found))
    return [name for name in extra if not name.startswith(prefixes)]


def _check_tensor(files: HFFiles, local: LocalTensor, where: str) -> None:
    _, entry = files.entries[local.name]
    if entry.shape != local.shape:
        raise UserError(f"{where}: {local.name} has shape {entry.shape}, config.json asks for {local.shape}; one of the two is wrong")
    if entry.dtype == E4M3:
        _check_scales(files, local.name, where)
    elif entry.dtype not in FLOATS:
        raise UserError(f"{where}: {local.name} has dtype {entry.code}; supported: F64, F32, F16, BF16, and F8_E4M3 with block scales")


def _check_scales(files: HFFiles, name: str, where: str) -> None:
    assert files.quantization is not None
    shape, scale = files.entries[name][1].shape, files.entries.get(name + SUFFIX)
    try:
        check_scale(name, shape, scale and scale[1].shape, files.quantization.block)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if scale and scale[1].dtype not in FLOATS:
        raise UserError(f"{where}: {name}{SUFFIX}, the scale of {name}, has dtype {scale[1].code}; supported: F64, F32, F16, BF16")


def check_scale_values(name: str, scale: Tensor, where: str) -> None:
    """Raise UserError where scales of FP8 blocks, [..., rows, columns] of any float dtype, are not finite and above zero."""
    wrong = ~(scale.isfinite() & (scale > 0))
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        raise UserError(f"{where}: {name} holds {int(wrong.sum())} scales that are not finite or not above zero, the first {scale[tuple(place)].item()} "
                        f"at {place}; the weights would be lost: download the file again, or quantise the model anew")


def _same(a: Any, b: Any) -> bool:
    if a.shape != b.shape:
        return False
    steps = range(0, a.shape[0], COMPARE_ROWS)
    return all(torch.equal(a[i:i + COMPARE_ROWS], b[i:i + COMPARE_ROWS]) for i in steps)
