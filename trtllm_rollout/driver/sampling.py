"""Our SamplingParams in TensorRT-LLM's words. What its samplers cannot do, or would ignore silently, is refused by name.

The two samplers of the PyTorch backend differ (docs/tensorrt-llm.md has the sources):

- TorchSampler reports log-probs of the unscaled logits (`LogprobMode.RAW`). It ignores min_p and penalties without a word (added by
  NVIDIA/TensorRT-LLM pull requests 16485 and 16590, July 2026), and seeds of requests.
- TRTLLMSampler, the C++ decoder, scales logits and applies penalties in place, then reports the log-prob under the whole vocabulary
  (`normalizeLogProbs` is false): at the temperature, before top-k, top-p and min-p. It leaves the `end_id` out of the tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from parallel.errors import UserError
from trtllm_rollout.driver.seam.build import Features
from trtllm_rollout.protocol import Request, SamplingParams

TORCH, CPP = "TorchSampler", "TRTLLMSampler"
NO_END = -1  # an end_id that no token has


@dataclass(frozen=True)
class Dialect:
    """Which sampler runs, and whether log-probs are recomputed from logits (`from_logits`, TorchSampler only)."""

    features: Features
    sampler: str
    from_logits: bool = False


def choose_sampler(wanted: str, temperature: float, from_logits: bool) -> str:
    """`auto`: the one whose log-probs are right at the run's temperature."""
    if wanted != "auto":
        return wanted
    return TORCH if temperature in (0.0, 1.0) or from_logits else CPP


def seed_of(stream: tuple[int, ...], sample: int) -> int:
    """A seed of 63 bits for one sample: a function of its random stream and number alone."""
    text = ",".join(map(str, (*stream, sample)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def translate(request: Request, sample: int, dialect: Dialect) -> dict[str, Any]:
    """Keywords of TensorRT-LLM's SamplingParams for one sample (n samples are n requests; they share the prompt's blocks).

    Raises UserError, naming the request and the parameter, for what the build and its sampler cannot do.
    """
    s = request.sampling
    if problem := _problem(s, dialect):
        raise UserError(f"request {request.request_id}: {problem}")
    greedy = s.temperature == 0
    stops = list(dict.fromkeys(s.stop_token_ids))
    out: dict[str, Any] = {
        "max_tokens": s.max_tokens,  # theirs defaults to 32
        "temperature": 1.0 if greedy else s.temperature,  # None for all three of temperature, top_k and top_p would mean greedy
        "top_k": 1 if greedy else s.top_k,  # 0 keeps all, as here
        "top_p": 1.0 if greedy else s.top_p,
        "seed": seed_of(request.stream, sample),
        "n": 1,
        "detokenize": False,
        "pad_id": stops[0] if stops else 0,
        "include_stop_str_in_output": True,  # else a stop id is cut off the sample
        # TorchSampler keeps the end_id in the sample; the C++ one does not, so there nothing is the end_id
        "end_id": stops[0] if stops and dialect.sampler == TORCH else NO_END,
        "logprobs": max(s.top_log_probs, 1 if dialect.sampler == CPP else 0),
    }
    if stops:
        out["stop_token_ids"] = stops
    if s.min_p > 0 and not greedy:
        out["min_p"] = s.min_p
    if s.min_tokens > 0 and stops:
        out["min_tokens"] = s.min_tokens
    if s.prompt_log_probs:
        out["prompt_logprobs"] = 1
    if needs_logits(s, dialect):
        out["return_generation_logits"] = True
    return out


def needs_logits(s: SamplingParams, dialect: Dialect) -> bool:
    """Whether log-probs of this request have to be recomputed: TorchSampler's are those at temperature 1."""
    return dialect.sampler == TORCH and dialect.from_logits and s.temperature not in (0.0, 1.0)


def _problem(s: SamplingParams, dialect: Dialect) -> str | None:
    """Why the request cannot be served as it is meant, or None."""
    name = f"{dialect.sampler} of tensorrt_llm {dialect.features.version}"
    penalised = [f"{n} {getattr(s, n)}" for n, off in (("repetition_penalty", 1.0), ("presence_penalty", 0.0)) if getattr(s, n) != off]
    if s.stop:
        return (f"stop {s.stop!r}: the driver keeps no tokenizer, and TensorRT-LLM would compare token sequences, not text; use stop_token_ids, "
                "or the embedded engine")
    if dialect.sampler == TORCH:
        if penalised:
            return f"{penalised[0]}: {name} accepts it and ignores it; leave penalties off"
        if s.min_p > 0:
            return f"min_p {s.min_p}: {name} ignores it; leave it at 0, or set rollout.tensorrt_llm.sampler: {CPP}"
        if s.temperature not in (0.0, 1.0) and not dialect.from_logits:
            return (f"temperature {s.temperature}: {name} reports log-probs at temperature 1, from which those at {s.temperature} do not follow; "
                    f"set rollout.tensorrt_llm.sampler: {CPP}, or rollout.tensorrt_llm.log_probs: logits")
        if s.min_tokens > 0 and len(set(s.stop_token_ids)) > 1:
            return (f"min_tokens {s.min_tokens} with {len(set(s.stop_token_ids))} stop ids: {name} holds back one of them only; use one, or "
                    "min_tokens 0")
        return None
    if penalised:
        return f"{penalised[0]}: {name} puts it into the log-probs it reports, which must be those before penalties; leave penalties off"
    if s.top_log_probs > 0:
        return f"top_log_probs {s.top_log_probs}: {name} reports the drawn token alone; set rollout.tensorrt_llm.sampler: {TORCH}"
    if s.min_tokens > 0 and s.stop_token_ids:
        return f"min_tokens {s.min_tokens}: {name} applies it to its end id alone, and that would be cut off the sample; set min_tokens 0"
    if s.min_p > 0 and "min_p" not in dialect.features.sampling:
        return f"min_p {s.min_p}: tensorrt_llm {dialect.features.version} does not have it; leave it at 0"
    return None
