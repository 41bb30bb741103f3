"""What `bench rollout` has generated, by our engine and by transformers' generate."""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from checkpoint.hf import read_hf
from parallel.model_config import ModelConfig
from trtllm_rollout.embedded.engine import EmbeddedEngine
from trtllm_rollout.protocol import Request, SamplingParams

MEAN_OF_MAX = 40 / 128  # ragged lengths: their mean over their maximum


@dataclass(frozen=True)
class Work:
    """`samples` of every prompt at temperature 1; sample s of prompt p ends after `lengths[p * samples + s]` tokens, one token like another.

    As requests of our engine: one a prompt, of which `stop_ids` end the samples (empty: all are as long as the longest); or, if
    `separate`, one a sample with a max_tokens of its own.
    """

    prompts: tuple[tuple[int, ...], ...]
    samples: int
    lengths: tuple[int, ...]
    stop_ids: tuple[int, ...] = ()
    separate: bool = False

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def prompt_tokens(self) -> int:
        """Of all samples, each with its prompt."""
        return self.samples * sum(map(len, self.prompts))

    @property
    def longest_prompt(self) -> int:
        return max(map(len, self.prompts))

    def of(self, tokens: int) -> Work:
        """The same with at most so many tokens a sample."""
        return Work(self.prompts, self.samples, tuple(min(n, tokens) for n in self.lengths), self.stop_ids, self.separate)

    def requests(self) -> list[Request]:
        if self.separate:
            return [Request(i, self.prompts[i // self.samples], SamplingParams(max_tokens=length), 1, (0, 0, i // self.samples, i % self.samples))
                    for i, length in enumerate(self.lengths)]
        sampling = SamplingParams(max_tokens=max(self.lengths), stop_token_ids=self.stop_ids)
        return [Request(p, ids, sampling, self.samples, (0, 0, p)) for p, ids in enumerate(self.prompts)]


def ragged_lengths(count: int, longest: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths from 1 to `longest` with mean 40/128 of it, as answers have them: many short, a tail, shuffled. They are the quantiles
    of an exponential distribution, cut off at `longest`, which one reaches; only their order depends on `seed`."""
    target = max(1.0, longest * MEAN_OF_MAX)
    points = [-math.log1p(-(i + 0.5) / count) for i in range(count)]

    def lengths(scale: float) -> list[int]:
        drawn = [min(longest, max(1, round(scale * x))) for x in points]
        return [*drawn[:-1], longest]

    low, high = 0.0, 4.0 * longest
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(lengths(middle)) < target * count else (low, middle)
    out = lengths(high)
    random.Random(seed).shuffle(out)
    return tuple(out)


def ragged_by_stop_ids(work: Work, answers: Sequence[Sequence[int]]) -> Work:
    """The same samples, ended by stop ids: such that their mean comes close to 40/128 of the longest, from above.

    `answers` are the tokens of all samples of `work`. A sample does not depend on what else is generated, so where a stop id ends it is
    known: at its first one. Ids that many samples have are taken first; one sample, of the fewest different ids, is let be.
    """
    longest, lengths = max(work.lengths), list(work.lengths)
    target = len(lengths) * max(1.0, longest * MEAN_OF_MAX)
    whole = set(min(map(set, answers), key=len))
    first: dict[int, dict[int, int]] = defaultdict(dict)
    for sample, ids in enumerate(answers):
        for position, token in enumerate(ids):
            first[token].setdefault(sample, position + 1)
    chosen = []
    for token in sorted(first, key=lambda token: (-len(first[token]), token)):
        cut = [min(length, first[token].get(sample, longest)) for sample, length in enumerate(lengths)]
        if token not in whole and cut != lengths and sum(cut) >= target:
            lengths, chosen = cut, [*chosen, token]
    return Work(work.prompts, work.samples, tuple(lengths), tuple(chosen))


def engine_for(model: ModelConfig, dtype: torch.dtype, device: torch.device, samples: int, tokens: int,
               fill: Callable[[EmbeddedEngine], None]) -> EmbeddedEngine:
    """An engine for `samples` at once of at most `tokens` tokens; `fill` writes its weights."""
    engine = EmbeddedEngine(model, dtype, max_batch_size=samples, max_seq_len=tokens, device=device)
    engine.begin_update()
    fill(engine)
    engine.commit(0)
    return engine


def from_files(directory: str, model: ModelConfig) -> Callable[[EmbeddedEngine], None]:
    return lambda engine: read_hf(directory, engine.layouts[0], engine.weights(), model)


def made_up(engine: EmbeddedEngine) -> None:
    """Random weights: norms 1, the rest normal with 0.02."""
    for name, tensor in engine.weights().items():
        tensor.fill_(1.0) if "norm" in name else tensor.normal_(0.0, 0.02)


@dataclass(frozen=True)
class Ran:
    """One run: seconds, what the engine says of itself, and the answers by prompt and sample."""

    seconds: float
    stats: Mapping[str, float] = field(default_factory=dict)
    answers: tuple[tuple[int, ...], ...] = ()

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers))


def run_engine(engine: EmbeddedEngine, work: Work, fresh: bool = True) -> Ran:
    """Let the engine do the work. A `fresh` run begins as after an update of the weights: without cached prompts."""
    if fresh:
        engine.begin_update()
        engine.commit(0)
    engine.verify()
    _synchronize()
    started = time.perf_counter()
    done = engine.generate(work.requests())
    _synchronize()
    seconds = time.perf_counter() - started
    ran = Ran(seconds, engine.stats(), tuple(c.token_ids for c in done))
    # in bfloat16 another batch may round differently, and a sample become another one
    assert abs(ran.tokens - work.tokens) <= (0.1 * work.tokens if work.stop_ids else 0), f"the engine made {ran.tokens} tokens of {work.tokens}"
    return ran


class Transformers:
    """transformers' generate on the same work: one batch of all samples, prompts padded on the left, until the longest is done."""

    def __init__(self, directory: str, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True).to(device).eval()
        self.device = device

    def run(self, work: Work) -> Ran:
        """The useful tokens are `work.tokens`; ragged samples are computed to the longest of them."""
        from transformers import GenerationConfig

        count, width = max(work.lengths), work.longest_prompt
        ids = torch.zeros(len(work.prompts), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(work.prompts):
            ids[row, width - len(prompt):] = torch.tensor(prompt)
            mask[row, width - len(prompt):] = 1
        options = GenerationConfig(max_new_tokens=count, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, num_return_sequences=work.samples,
                                   eos_token_id=None, pad_token_id=0)
        self.model.generation_config = options  # else what the directory's says of ends and penalties is taken in
        ids, mask = ids.to(self.device), mask.to(self.device)
        _synchronize()
        started = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(ids, attention_mask=mask, generation_config=options)
        _synchronize()
        seconds = time.perf_counter() - started
        assert out.shape == (len(work.lengths), width + count), f"transformers made {tuple(out.shape)}"
        return Ran(seconds)


def fastest(name: str, run: Callable[[], Ran], tokens: int, repeat: int) -> Ran:
    """The fastest of `repeat` runs."""
    found = []
    for number in range(1, repeat + 1):
        found.append(run())
        seconds = found[-1].seconds
        print(f"{name}: run {number} of {repeat}, {tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s", flush=True)
    return min(found, key=lambda ran: ran.seconds)


def phases_of(stats: Mapping[str, float]) -> dict[str, float]:
    """Seconds by what they were spent on."""
    return {name: stats[f"seconds_{name}"] for name in ("prefill", "decode", "sampling", "other")}


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def random_prompts(count: int, tokens: int, vocabulary: int, seed: int = 0) -> tuple[tuple[int, ...], ...]:
    drawn = torch.randint(0, vocabulary, (count, tokens), generator=torch.Generator().manual_seed(seed))
    return tuple(map(tuple, drawn.tolist()))


