"""Rollout: tokens per second of the embedded engine, beside transformers' generate and beside the device's matrix products.

    mcore-rl bench rollout --json
    mcore-rl bench rollout --model models/SmolLM2-135M-Instruct --prompts 4 --samples 8 --max-tokens 64 --threads 2

One rank; random prompts of one length; no stop token, so both make the same number of tokens. The engine also returns
log-probs, transformers is not asked for them. The ceiling is one pass of the weights per generated token, prompts not counted.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch

from benchmarks._ceiling import gemm_flops, weights_per_token
from checkpoint.hf import read_hf
from parallel.device import prepare_megatron, select_device
from parallel.environment import read_environment
from parallel.errors import UserError
from parallel.model import torch_dtype
from parallel.model_config import ModelConfig
from trtllm_rollout.embedded.engine import EmbeddedEngine
from trtllm_rollout.protocol import Request, SamplingParams


def measure(options: list[str]) -> dict[str, float | str] | None:
    """Tokens per second of engine, rival and ceiling."""
    a = _options(options)
    if read_environment().world_size > 1:
        raise UserError("bench rollout measures one rank; start it as a plain process")
    model = ModelConfig.from_directory(a.model)
    device = select_device(a.device)
    prepare_megatron(device)  # what it sets up for the device holds for both
    torch.set_num_threads(a.threads)
    dtype = torch_dtype(a.dtype or model.dtype)
    prompts = torch.randint(0, model.vocab_size, (a.prompts, a.prompt_tokens), generator=torch.Generator().manual_seed(0))
    tokens = a.prompts * a.samples * a.max_tokens
    engine = _seconds("embedded engine", engine_work(a, model, dtype, prompts, device.torch), a.max_tokens, a.repeat)
    rival = _seconds("transformers", transformers_work(a, dtype, prompts, device.torch), a.max_tokens, a.repeat)
    rate = gemm_flops(dtype, device.torch)
    ceiling = rate / (2 * weights_per_token(model))
    return {"tokens": float(tokens), "engine_seconds": engine, "engine_tokens_per_s": tokens / engine, "transformers_seconds": rival,
            "transformers_tokens_per_s": tokens / rival, "gemm_gflops": rate / 1e9, "ceiling_tokens_per_s": ceiling,
            "engine_of_ceiling": tokens / engine / ceiling, "dtype": str(dtype).removeprefix("torch."), "device": device.type,
            "threads": float(a.threads)}


def _options(options: list[str]) -> argparse.Namespace:
    p = argparse.ArgumentParser("mcore-rl bench rollout", description="Measure generation.")
    p.add_argument("--model", metavar="DIR", default="models/SmolLM2-135M-Instruct",
                   help="Hugging Face model directory (default: models/SmolLM2-135M-Instruct, from mcore-rl fetch smollm2)")
    p.add_argument("--prompts", type=int, default=8, metavar="N")
    p.add_argument("--samples", type=int, default=4, metavar="N", help="responses per prompt (default 4)")
    p.add_argument("--prompt-tokens", type=int, default=32, metavar="N")
    p.add_argument("--max-tokens", type=int, default=32, metavar="N", help="tokens of every response (default 32)")
    p.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: the model's")
    p.add_argument("--threads", type=int, default=os.cpu_count() or 1, metavar="N", help="CPU threads (default: all)")
    p.add_argument("--repeat", type=int, default=2, metavar="N", help="the fastest of N counts, after a short warm-up (default 2)")
    p.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    arguments = p.parse_args(options)
    for name in ("prompts", "samples", "prompt_tokens", "max_tokens", "threads", "repeat"):
        if getattr(arguments, name) < 1:
            raise UserError(f"bench rollout: --{name.replace('_', '-')} is {getattr(arguments, name)}; it must be at least 1")
    return arguments


def engine_work(a: argparse.Namespace, model: ModelConfig, dtype: torch.dtype, prompts: torch.Tensor,
                device: torch.device) -> Callable[[int], int]:
    """A call that generates so many tokens per sample and returns how many it made."""
    engine = EmbeddedEngine(model, dtype, max_batch_size=a.prompts * a.samples, max_seq_len=a.prompt_tokens + a.max_tokens, device=device)
    engine.begin_update()
    read_hf(a.model, engine.layouts[0], engine.weights(), model)
    engine.commit(0)

    def work(count: int) -> int:
        sampling = SamplingParams(1.0, max_tokens=count)
        return sum(len(c.token_ids) for c in engine.generate(
            [Request(i, tuple(row), sampling, a.samples, (0, i)) for i, row in enumerate(prompts.tolist())]))

    return work


def transformers_work(a: argparse.Namespace, dtype: torch.dtype, prompts: torch.Tensor, device: torch.device) -> Callable[[int], int]:
    """The same work by transformers' generate, with its key-value cache."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=dtype, local_files_only=True).to(device).eval()
    inputs = prompts.to(device)

    def work(count: int) -> int:
        options = GenerationConfig(max_new_tokens=count, min_new_tokens=count, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                                   num_return_sequences=a.samples, eos_token_id=None, pad_token_id=0)
        with torch.inference_mode():
            out = model.generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=options)
        return out[:, inputs.shape[1]:].numel()

    return work


def _seconds(name: str, work: Callable[[int], int], count: int, repeat: int) -> float:
    """Fastest of `repeat` calls of `work(count)`, after a short one."""
    work(2)
    best = float("inf")
    for number in range(1, repeat + 1):
        started = time.perf_counter()
        tokens = work(count)
        best = min(best, time.perf_counter() - started)
        print(f"{name}: run {number} of {repeat}, {tokens} tokens, best {best:.2f} s", flush=True)
    return best
