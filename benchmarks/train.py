"""Training: what a GRPO update costs beside a bare Megatron-Core loop, padding, repeated prompts and transformers.

    mcore-rl bench train --json
    mcore-rl bench train --model models/SmolLM2-135M-Instruct --dtype float32 --repeat 3

One rank. What is compared runs in turns, in this process, `--repeat` times; figures are medians of the ratios of a turn.
`bare_overhead`: a whole update (policy loss, entropy, optimizer step) of padded rows over a loop that calls Megatron-Core's GPTModel, its
own loss and the same optimizer on the same rows, minus 1. `packed_speedup`: useful tokens per second of packed over padded rows, with the
lengths of GSM8K's first questions and answers; log-probs of the answers are wanted. `shared_prompt_speedup`: 8 prompts of 95 tokens with 8
responses of 64, prompts computed once over packed rows. `hf_ratio`: forward and backward of transformers over ours on the same padded rows,
all tokens predicted, transformers without an attention mask (which right padding does not need and which would slow it down);
`hf_ratio_packed` over our packed rows. `mfu`: operations of a forward and a backward pass over useful tokens (2 and 4 a weight, and those
of causal attention) of the packed update, as a share of one large matrix product's rate.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks._ceiling import gemm_flops
from mcore_rl.algorithms import loss_counts, loss_weights, policy_loss
from mcore_rl.policy import Policy
from mcore_rl.run import joined, make_policy
from parallel.config import ParallelConfig
from parallel.environment import read_environment
from parallel.errors import UserError
from parallel.micro_batch import MicroBatch, make_micro_batches
from parallel.model_config import ModelConfig
from parallel.packing import Batching, Packing, Work
from parallel.training import OptimizerConfig, TrainingModel

# tokens of question and answer of the first rows of GSM8K's training set (SmolLM2's tokenizer, each with one token more)
GSM8K = ((40, 62), (35, 67), (62, 104), (57, 131), (28, 78), (66, 169), (63, 91), (108, 118), (113, 141), (69, 369), (77, 149), (96, 154), (42, 93),
         (72, 91), (32, 80), (71, 219), (57, 131), (81, 236), (65, 145), (65, 121), (74, 90), (51, 130), (64, 91), (58, 155), (82, 67), (95, 152),
         (54, 96), (88, 227), (51, 71), (56, 210), (60, 143), (65, 146))
GROUPS = ((95, 64),) * 8  # prompt and response; the samples of a group make as many sequences each
SIZES = dict(model_type="llama", hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=8192, max_position_embeddings=1024, rope_theta=10000.0, rms_norm_eps=1e-5, tie_word_embeddings=True)
SIZES_1B = dict(model_type="llama", hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
                vocab_size=128256, max_position_embeddings=2048, rope_theta=500000.0, rms_norm_eps=1e-5, tie_word_embeddings=True)
MADE_UP = {None: SIZES, "made-up-1b": SIZES_1B}  # the second: the sizes of Llama 3.2 1B
Sequences = tuple[list[list[int]], list[list[bool]]]


def measure(options: list[str]) -> dict[str, Any] | None:
    """Ratios to the rivals, and the share of the device's matrix products."""
    a = _options(options)
    if read_environment().world_size > 1:
        raise UserError("bench train measures one rank; start it as a plain process")
    with tempfile.TemporaryDirectory() as work, joined(a.device, a.threads) as world:
        directory = _made_up(Path(work), MADE_UP[a.model]) if a.model in MADE_UP else a.model
        model = ModelConfig.from_directory(directory)
        dtype = a.dtype or ("float32" if a.model in MADE_UP else model.dtype)
        policy = make_policy(world, model, ParallelConfig(), dtype, 1, directory, OptimizerConfig(lr=1e-6, distributed=False), "torch")
        figures: dict[str, Any] = {}
        answers = sequences(GSM8K[:a.sequences], 1, model.vocab_size)
        few = (answers[0][:a.micro_batch], answers[1][:a.micro_batch])
        if "bare" in a.only:
            figures |= _bare(policy, few, a)
        if "packed" in a.only:
            figures |= _packed(policy, answers, a)
        if "transformers" in a.only:
            figures |= _transformers(policy, few[0], directory, a)
        if "shared" in a.only:
            figures |= _shared(policy, sequences(GROUPS[:a.prompts], a.samples, model.vocab_size), a)
        rate = gemm_flops(policy.training.dtype, world.device.torch)
        figures["gemm_gflops"] = rate / 1e9
        if "packed" in a.only:
            figures["mfu"] = figures.pop("operations") / figures["packed_seconds"] / rate
        return {**figures, "repeat": a.repeat, "clock": a.clock, "dtype": dtype, "device": world.device.type, "threads": torch.get_num_threads()}


def _options(options: list[str]) -> argparse.Namespace:
    p = argparse.ArgumentParser("mcore-rl bench train", description="Measure a training update beside its rivals.")
    p.add_argument("--model", metavar="DIR", help="Hugging Face directory, or made-up-1b (default: a made-up llama of 5 million parameters)")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), help="type of weights and computation (default: float32, or the model's)")
    p.add_argument("--repeat", type=int, default=7, metavar="N", help="turns of each comparison (default 7)")
    p.add_argument("--sequences", type=int, default=len(GSM8K), metavar="N", help=f"GSM8K rows of an update (default {len(GSM8K)}, at most that)")
    p.add_argument("--micro-batch", type=int, default=16, metavar="N", help="sequences of a micro-batch; those of the first one are what the bare "
                                                                             "loop and transformers get (default 16)")
    p.add_argument("--prompts", type=int, default=len(GROUPS), metavar="N", help=f"groups of the shared-prompt comparison (default {len(GROUPS)})")
    p.add_argument("--samples", type=int, default=8, metavar="N", help="samples of a group (default 8)")
    p.add_argument("--device", default="auto", help="auto, cpu or cuda (default auto)")
    p.add_argument("--threads", type=int, default=os.cpu_count() or 1, metavar="N", help="CPU threads (default: all cores)")
    p.add_argument("--clock", choices=("wall", "processor"), default="wall",
                   help="processor: the seconds of this process's CPU threads, which other programs' work changes little (with --threads 1)")
    p.add_argument("--only", choices=("bare", "packed", "transformers", "shared"), nargs="+", default=("bare", "packed", "transformers", "shared"),
                   help="comparisons to make (default: all)")
    a = p.parse_args(options)
    if min(a.repeat, a.prompts, a.samples, a.threads, a.micro_batch) < 1 or not 2 <= a.sequences <= len(GSM8K):
        raise UserError(f"bench train: --repeat {a.repeat}, --prompts {a.prompts}, --samples {a.samples}, --threads {a.threads} and "
                        f"--micro-batch {a.micro_batch} must be at least 1, --sequences {a.sequences} from 2 to {len(GSM8K)}")
    return a


def _made_up(directory: Path, sizes: dict[str, Any]) -> str:
    """A llama with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes), dtype=torch.float32).save_pretrained(directory)
    return str(directory)


def sequences(lengths: tuple[tuple[int, int], ...], samples: int, vocab_size: int) -> Sequences:
    """Random token ids of (prompt, response) lengths, `samples` responses to each prompt, and masks that are true in responses."""
    r = torch.Generator().manual_seed(0)
    ids, masks = [], []
    for prompt, response in lengths:
        head = torch.randint(4, vocab_size, (prompt,), generator=r).tolist()
        for _ in range(samples):
            ids.append(head + torch.randint(4, vocab_size, (response,), generator=r).tolist())
            masks.append([False] * prompt + [True] * response)
    return ids, masks


def in_turns(runs: dict[str, Callable[[], None]], repeat: int, device: torch.device, clock: str = "wall") -> dict[str, list[float]]:
    """Seconds of each run, `repeat` times in turns and in changing order, after one that warms up."""
    now = time.process_time if clock == "processor" else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeat + 1):
        for name in (runs if turn % 2 else reversed(runs)):
            started = now()
            runs[name]()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(now() - started)
    return {name: values[1:] for name, values in seconds.items()}


def ratio(above: list[float], below: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def update(policy: Policy, packing: Packing, samples: Sequences, size: int, wanted: bool) -> Callable[[], None]:
    """One GRPO update on advantages of both signs; `wanted`: log-probs of responses only, and not of all tokens."""
    ids, masks = samples
    chosen = Policy(policy.training, policy.exchange, 1, Batching(packing))
    trained = [torch.tensor(m) if wanted else torch.ones(len(m)).index_fill(0, torch.tensor([0]), 0) for m in masks]
    counts = loss_counts(trained)
    device = policy.training.device.torch
    weights = [loss_weights(m, counts, "token-mean").to(device) for m in trained]

    def loss(i: int, log_probs: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
        per_token, _ = policy_loss(log_probs, log_probs.detach(), torch.tensor(1.0 if i % 2 else -1.0, device=device), 0.2, 0.2)
        total = (weights[i] * per_token).sum()
        return total, torch.stack([total, (weights[i] * entropy).sum()]).detach()

    return lambda: void(chosen.update(ids, range(len(ids)), size, 1.0, loss, masks if wanted else None))


def void(value: Any) -> None:
    """Of a run only the time counts."""


def _bare(policy: Policy, samples: Sequences, a: argparse.Namespace) -> dict[str, Any]:
    training = policy.training
    padded, = make_micro_batches(samples[0], [range(len(samples[0]))], training.parallel, "padded", None, training.device.torch)
    seconds = in_turns({"ours": update(policy, "padded", samples, len(samples[0]), False), "bare": lambda: bare_update(training, padded)},
                       a.repeat, training.device.torch, a.clock)
    return {"bare_overhead": ratio(seconds["ours"], seconds["bare"]) - 1, "bare_seconds": statistics.median(seconds["bare"])}


def bare_update(training: TrainingModel, batch: MicroBatch) -> None:
    """What one writes with Megatron-Core alone: its schedule, GPTModel with labels, a masked mean, its optimizer."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    labels = batch.tokens.roll(-1, 1)
    lengths = torch.tensor(batch.lengths, device=batch.tokens.device)
    mask = batch.positions < (lengths - 1).unsqueeze(1)

    def forward_step(iterator: Iterator[MicroBatch], chunk: Any) -> Any:
        one = next(iterator)
        losses = chunk(one.tokens, one.positions, None, labels=labels)
        return losses, lambda x: ((x * mask).sum() / mask.sum(), torch.ones((), dtype=torch.int, device=x.device), {})

    with training.entered(), with_logits(training):
        training.chunks[0].zero_grad_buffer()
        training.optimizer.zero_grad()
        get_forward_backward_func()(forward_step_func=forward_step, data_iterator=iter([batch]), model=training.chunks[0], num_microbatches=1,
                                    seq_length=batch.tokens.shape[1], micro_batch_size=batch.tokens.shape[0], forward_only=False)
        training.optimizer.step()


@contextlib.contextmanager
def with_logits(training: TrainingModel) -> Iterator[None]:
    """Inside, GPTModel applies its head as Megatron-Core has it."""
    layer = training.modules[-1].output_layer
    ours = layer.__dict__.pop("forward")
    try:
        yield
    finally:
        layer.forward = ours


def _packed(policy: Policy, samples: Sequences, a: argparse.Namespace) -> dict[str, Any]:
    tokens = sum(map(len, samples[0]))
    seconds = in_turns({p: update(policy, p, samples, a.micro_batch, True) for p in ("padded", "packed")}, a.repeat,
                       policy.training.device.torch, a.clock)
    packed = statistics.median(seconds["packed"])
    work = Work(policy.training.model)
    # a product of a weight or of a key is two operations, and as many again for each of the two gradients
    return {"packed_speedup": ratio(seconds["padded"], seconds["packed"]), "packed_seconds": packed, "useful_tokens_per_s": tokens / packed,
            "operations": 6 * sum(work(len(ids)) for ids in samples[0])}


def _shared(policy: Policy, samples: Sequences, a: argparse.Namespace) -> dict[str, Any]:
    runs = {p: update(policy, p, samples, a.micro_batch, True) for p in ("packed", "shared_prompt")}
    seconds = in_turns(runs, a.repeat, policy.training.device.torch, a.clock)
    return {"shared_prompt_speedup": ratio(seconds["packed"], seconds["shared_prompt"]),
            "shared_prompt_seconds": statistics.median(seconds["shared_prompt"])}


def _transformers(policy: Policy, ids: list[list[int]], directory: str, a: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    training = policy.training
    device = training.device.torch
    rival = AutoModelForCausalLM.from_pretrained(directory, dtype=training.dtype).to(device).train()
    batches = {p: make_micro_batches(ids, [range(len(ids))], training.parallel, p, None, device) for p in ("padded", "packed")}
    tokens = batches["padded"][0].tokens
    labels = tokens.clone()
    for row, n in enumerate(map(len, ids)):
        labels[row, n:] = -100

    def theirs() -> None:
        rival.zero_grad(set_to_none=False)
        rival(input_ids=tokens, labels=labels, use_cache=False).loss.backward()

    def ours(packing: str) -> Callable[[], None]:
        return lambda: void(training.forward_backward(batches[packing], lambda batch, log_probs, entropy: (-log_probs.mean(), {})))

    seconds = in_turns({"hf": theirs, "padded": ours("padded"), "packed": ours("packed")}, a.repeat, device, a.clock)
    return {"hf_ratio": ratio(seconds["hf"], seconds["padded"]), "hf_ratio_packed": ratio(seconds["hf"], seconds["packed"]),
            "hf_seconds": statistics.median(seconds["hf"])}
