"""What `quantization_config` of a config.json, or modelopt's hf_quant_config.json, says: block-quantised FP8 is read, every other method is refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from parallel.errors import UserError

FORMATS = ("e4m3", "float8_e4m3fn")
MODELOPT = "hf_quant_config.json"
INSTEAD = "give a bf16 or fp32 directory, or one in FP8 with weight_block_size (e.g. [128, 128]) and activation_scheme 'dynamic'"


@dataclass(frozen=True)
class BlockFP8:
    """FP8 e4m3 codes with one scale for every block of `block` = (rows, columns): weight = code * scale (`_scale_inv`).

    Blocks start at row and column 0 of every matrix; the last one of a row or column may be partial.
    """

    block: tuple[int, int]


def read_quantization(hf: dict[str, Any]) -> BlockFP8 | None:
    """How the files of a config.json are quantised; None where they are not.

    Raises UserError that names the method for anything but block FP8. A block size that is not there is 128 x 128, as in
    transformers' FineGrainedFP8Config; it is never guessed from shapes.
    """
    config = hf.get("quantization_config") or hf.get("compression_config")
    if not config:
        return None
    return _read(config, f"model config.json ({hf.get('model_type')})")


def read_modelopt(declared: Any, where: str) -> BlockFP8 | None:
    """How the files beside a modelopt `hf_quant_config.json` are quantised, as if its content were in config.json.

    Raises UserError that names `where`, the file's path, and the method. Source: TensorRT-LLM's `ModelConfig.load_modelopt_quant_config`.
    """
    if not isinstance(declared, dict):
        raise UserError(f"{where} holds {declared!r}; it must be an object with producer and quantization")
    inner = declared.get("quantization")
    return _read({**declared, **(inner if isinstance(inner, dict) else {})}, where)


def _read(config: Any, where: str) -> BlockFP8:
    if not isinstance(config, dict):
        raise UserError(f"{where}: quantization_config is {config!r}; it must be an object with a quant_method")
    method = config.get("quant_method") or _unnamed(config)
    if method != "fp8":
        hint = "; dequantise it first, e.g. transformers' Mxfp4Config(dequantize=True) and save_pretrained" if method == "mxfp4" else ""
        raise UserError(f"{where}: quantization {str(method)!r} is not supported; {INSTEAD}{hint}")
    if config.get("fmt", "e4m3") not in FORMATS:
        raise UserError(f"{where}: FP8 format {config['fmt']!r} is not supported; supported: {', '.join(FORMATS)}")
    if config.get("activation_scheme", "dynamic") != "dynamic":
        raise UserError(f"{where}: FP8 with activation_scheme {config['activation_scheme']!r} is not supported; {INSTEAD}")
    block = config.get("weight_block_size", [128, 128])
    if not block:
        raise UserError(f"{where}: FP8 with weight_block_size {block} (one scale per tensor) is not supported; {INSTEAD}")
    if not isinstance(block, (list, tuple)) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise UserError(f"{where}: weight_block_size {block!r} must be two positive numbers, e.g. [128, 128]")
    return BlockFP8((block[0], block[1]))


def _unnamed(config: dict[str, Any]) -> str:
    """What to call a method that does not name itself, as modelopt's."""
    producer = config.get("producer")
    words = (producer.get("name") if isinstance(producer, dict) else producer, config.get("quant_algo") or config.get("format"))
    return " ".join(str(word) for word in words if word) or "without a quant_method"
