"""What every engine understands: token ids in, token ids out, weights in place, one committed version at a time.

The life of an engine between two updates of the policy:

    engine.begin_update()                       # refuses from here on; every cached key, value and prefix is dropped
    move(plan, ..., engine.weights())           # whoever owns the plan writes into the engine's own tensors
    engine.commit(version, checksums)           # the engine may generate again, once its weights match the checksums
    engine.verify()                             # they do, on every rank of the engine
    completions = engine.generate(requests)

On tensor-parallel ranks every rank makes the same calls in the same order and receives the same completions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from parallel.errors import UserError
from resharding.layout import Layout


class EngineRefuses(RuntimeError):
    """The engine will not generate: nothing committed, asleep, or weights that are not what was committed."""


MOST = 1 << 31  # of whole numbers: arrays hold 64 bits, and no vocabulary or answer is longer
SMALLEST_TEMPERATURE, LARGEST_TEMPERATURE = 1e-5, 1e5  # beyond, logits / temperature leave fp32 and the weights would be blamed for it
STRONGEST_PENALTY = 100.0  # likewise


def _whole(name: str, value: Any, least: int, what: str, most: int | None = MOST) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{name} is {value!r}; it must be a whole number of at least {least}{what}")
    if most is not None and value > most:
        raise UserError(f"{name} is {value}; it must be at most {most}{what}")


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn, and what is reported of them. Raises UserError where a value cannot be used.

    Order (as in transformers, vLLM and TensorRT-LLM): penalties and `min_tokens` change the logits, then temperature, then top-k,
    then top-p over what top-k left, then min-p over what top-p left.
    """

    temperature: float = field(default=1.0, metadata={"help": "softmax temperature; 0 takes the most likely token (greedy)"})
    top_k: int = field(default=0, metadata={"help": "keep the k most likely tokens; 0 keeps all"})
    top_p: float = field(default=1.0, metadata={"help": "keep the smallest set of tokens whose probability reaches p; 1 keeps all"})
    max_tokens: int = field(default=16, metadata={"help": "most tokens generated for one sample"})
    stop_token_ids: tuple[int, ...] = field(default=(), metadata={"help": "ids that end a sample; the id stays in its tokens"})
    min_p: float = field(default=0.0, metadata={"help": "drop tokens less likely than min_p times the most likely one; 0 keeps all"})
    repetition_penalty: float = field(default=1.0, metadata={"help": "divides positive and multiplies negative logits of tokens seen in prompt "
                                                                     "or answer (CTRL, Keskar et al. 2019); 1 changes nothing"})
    presence_penalty: float = field(default=0.0, metadata={"help": "subtracted from the logits of tokens seen in the answer; 0 changes nothing"})
    min_tokens: int = field(default=0, metadata={"help": "no stop id or stop string ends a sample before it has so many tokens"})
    stop: tuple[str, ...] = field(default=(), metadata={"help": "strings that end a sample as soon as its text holds one; the token that "
                                                                "completes it stays (the engine needs a tokenizer)"})
    top_log_probs: int = field(default=0, metadata={"help": "report so many most likely tokens at every position"})
    prompt_log_probs: bool = field(default=False, metadata={"help": "report the log-probs of the prompt's own tokens"})

    def __post_init__(self) -> None:
        temperature, repetition, presence = self.temperature, self.repetition_penalty, self.presence_penalty
        if not isinstance(temperature, (int, float)) or temperature != 0 and not SMALLEST_TEMPERATURE <= temperature <= LARGEST_TEMPERATURE:
            raise UserError(f"temperature is {temperature!r}; it must be 0 (greedy) or from {SMALLEST_TEMPERATURE} to {LARGEST_TEMPERATURE:g}")
        if not isinstance(self.top_p, (int, float)) or not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p!r}; it must be above 0 and at most 1 (1 keeps all tokens)")
        if not isinstance(self.min_p, (int, float)) or not 0 <= self.min_p <= 1:
            raise UserError(f"min_p is {self.min_p!r}; it must be between 0 (keeps all tokens) and 1")
        if not isinstance(repetition, (int, float)) or not 1 / STRONGEST_PENALTY <= repetition <= STRONGEST_PENALTY:
            raise UserError(f"repetition_penalty is {repetition!r}; it must be from {1 / STRONGEST_PENALTY} to {STRONGEST_PENALTY:g} "
                            "(1 changes nothing)")
        if not isinstance(presence, (int, float)) or not -STRONGEST_PENALTY <= presence <= STRONGEST_PENALTY:
            raise UserError(f"presence_penalty is {presence!r}; it must be from -{STRONGEST_PENALTY:g} to {STRONGEST_PENALTY:g} "
                            "(0 changes nothing)")
        _whole("top_k", self.top_k, 0, " (0 keeps all tokens)")
        _whole("max_tokens", self.max_tokens, 1, "")
        _whole("min_tokens", self.min_tokens, 0, "")
        _whole("top_log_probs", self.top_log_probs, 0, "")
        if self.min_tokens > self.max_tokens:
            raise UserError(f"min_tokens is {self.min_tokens}; it must be at most max_tokens, {self.max_tokens}")
        for token in self.stop_token_ids:
            _whole("a stop token id", token, 0, "")
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise UserError(f"stop is {self.stop!r}; it must be a list of strings that are not empty")


@dataclass(frozen=True)
class Request:
    """One prompt and how often to continue it.

    `stream` names the source of randomness, by convention (seed, step, prompt); sample k draws from (*stream, k) and from
    nothing else, so it comes out the same in any batch, in any order, on any number of ranks and after a restart.
    `priority`: smaller ones are served first, and preempted last; equal ones in order of arrival. `every_token`: `step` reports
    the tokens of its samples as they are made.
    """

    request_id: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    samples: int = 1
    stream: tuple[int, ...] = (0,)
    priority: int = 0
    every_token: bool = False

    def __post_init__(self) -> None:
        if not len(self.prompt_ids):
            raise UserError(f"request {self.request_id}: the prompt is empty; give at least one token (a bos token will do)")
        _whole(f"request {self.request_id}: samples", self.samples, 1, "")
        for part in self.stream:
            _whole(f"request {self.request_id}: a part of the random stream", part, 0, "", None)


@dataclass(frozen=True)
class Timing:
    """Of one sample, in seconds: waiting for its first computation, until its first token, until its end, all since `submit`;
    `preemptions`: how often it was put back and computed again."""

    queued: float = 0.0
    first_token: float = 0.0
    total: float = 0.0
    preemptions: int = 0


@dataclass(frozen=True)
class Completion:
    """One finished sample of a request.

    `token_ids` [tokens] keeps the stop token. `log_probs` [tokens] are natural logarithms of the sampled tokens' probability
    under the full softmax of logits / temperature, *before* penalties and the top-k, top-p and min-p cuts; greedy samples report
    temperature 1. `raw_log_probs` [tokens]: the same at temperature 1. `sampled_log_probs` [tokens]: those of the distribution
    that was drawn from, after penalties, temperature and cuts (0 where greedy). `versions` [tokens] names the weights that made
    each token. `finish_reason` is "stop", "length" or "abort"; `stop_reason` the stop id or string that was met.

    On request: `top_log_probs` [tokens], at each position the (id, raw log-prob) of the most likely tokens, best first; and
    `prompt_log_probs` [prompt tokens - 1], raw, from the second token on. `experts` [tokens, layers with experts, top_k] int16, of an
    engine that reports them: the choice of every token it computed, prompt first; those at the end that it did not (the last one,
    which nothing follows) are left out.
    """

    request_id: int
    sample: int
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: str
    stop_reason: int | str | None = None
    raw_log_probs: tuple[float, ...] = ()
    sampled_log_probs: tuple[float, ...] = ()
    top_log_probs: tuple[tuple[tuple[int, float], ...], ...] = ()
    prompt_log_probs: tuple[float, ...] = ()
    experts: torch.Tensor | None = field(default=None, compare=False)
    timing: Timing = field(default=Timing(), compare=False)


@dataclass(frozen=True)
class Progress:
    """Tokens that an unfinished sample of an `every_token` request has made since the last report; `token_ids` and `log_probs` [new]."""

    request_id: int
    sample: int
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]


class Engine(Protocol):
    """What generates tokens. The embedded engine and the TensorRT-LLM driver both satisfy it."""

    @property
    def version(self) -> int | None:
        """The committed weights version; None before the first commit and during an update."""

    @property
    def layouts(self) -> list[Layout]:
        """The `trtllm` layouts of all tensor-parallel ranks of this engine, in rank order."""

    def weights(self) -> dict[str, torch.Tensor]:
        """This rank's resident tensors by layout name; the same storage for the engine's life. Write only after begin_update."""

    def begin_update(self) -> None:
        """Stop generating, end unfinished samples as "abort" and drop every cached key, value and prefix."""

    def commit(self, version: int, checksums: Mapping[str, int] | None = None) -> None:
        """Declare the resident weights to be `version`. `checksums` maps canonical names to what they must add up to."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raises UserError for a prompt that does not fit or has ids outside the vocabulary."""

    def stream(self) -> Iterator[Completion]:
        """Completions as they finish, until all submitted work is done. Raises EngineRefuses, and drops the work, where the
        engine may not generate: on every rank, also where only one has the reason."""

    def step(self) -> list[Completion | Progress]:
        """One iteration of the submitted work, for callers that add requests in between (a server); [] where there is none.
        Every token of an `every_token` request comes in one Progress, the last of them before its Completion."""

    def abort(self, request_ids: Iterable[int]) -> None:
        """End these requests now; what they have so far is streamed with finish reason "abort"."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Submit and stream to the end; ordered by request, then sample. Raises UserError and EngineRefuses."""

    def sleep(self, tags: Sequence[str]) -> None:
        """Free the storage of "kv_cache" and/or "weights"."""

    def wake(self, tags: Sequence[str]) -> None:
        """Take the storage back. Weights come back empty: begin_update, fill and commit before generating."""

    def stats(self) -> dict[str, float]:
        """Counts and seconds since the last commit: tokens, seconds, tokens_per_second, prefill_tokens, checksum_seconds, ..."""
