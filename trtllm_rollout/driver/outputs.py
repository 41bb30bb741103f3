"""TensorRT-LLM's outputs as our Completions: log-probs found by token id, at the right temperature, with the stop token kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trtllm_rollout.driver.sampling import CPP, Dialect, needs_logits
from trtllm_rollout.protocol import Completion, EngineRefuses, Request, Timing

FINISH = {"stop": "stop", "length": "length", "timeout": "abort", "cancelled": "abort", None: "abort"}


@dataclass(frozen=True)
class Output:
    """What TensorRT-LLM said of one sample so far, in plain values. `logits` [tokens, vocab] where they were asked for.

    `log_probs` [tokens]: of each position, {token id: log-prob}; `prompt_log_probs` the same for the prompt.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[dict[int, float], ...]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_log_probs: tuple[dict[int, float], ...] = ()
    logits: torch.Tensor | None = field(default=None, compare=False)


def read_output(result: Any) -> Output:
    """Of a RequestOutput, its only completion."""
    out = result.outputs[0]
    return Output(tuple(out.token_ids), _positions(out.logprobs), out.finish_reason, out.stop_reason, _positions(out.prompt_logprobs),
                  out.generation_logits)


def _positions(values: Any) -> tuple[dict[int, float], ...]:
    """{id: log-prob} of every position. The dict may hold neighbours of the drawn token before it, so its order says nothing."""
    if not values:
        return ()
    if any(isinstance(v, float) for v in values):
        raise EngineRefuses("TensorRT-LLM returned log-probs without token ids (logprobs_simple_format); the driver did not ask for them")
    return tuple({int(token): float(getattr(value, "logprob", value)) for token, value in (v or {}).items()} for v in values)


def completion(request: Request, sample: int, output: Output, dialect: Dialect, version: int, timing: Timing = Timing()) -> Completion:
    """The finished sample. Raises EngineRefuses where the stop token or a log-prob is missing: training on that would be silently wrong."""
    where = f"request {request.request_id}, sample {sample}"
    s = request.sampling
    tokens, reason, stop = _ended(where, request, output)
    reported = look_up(where, tokens, output.log_probs)
    greedy = s.temperature == 0
    raw: tuple[float, ...] = ()
    if dialect.sampler == CPP:
        log_probs = reported
        raw = reported if greedy or s.temperature == 1 else ()
    else:
        raw = reported
        log_probs = _from_logits(where, tokens, output.logits, s.temperature) if needs_logits(s, dialect) else reported
    cut = s.top_k not in (0,) or s.top_p < 1 or s.min_p > 0
    drawn = tuple(0.0 for _ in tokens) if greedy or s.top_k == 1 else () if cut else log_probs
    top = tuple(tuple(sorted(((t, p) for t, p in position.items()), key=lambda item: -item[1])[:s.top_log_probs])
                for position in output.log_probs[:len(tokens)]) if s.top_log_probs else ()
    prompt = _prompt(where, request, output) if s.prompt_log_probs and reason != "abort" else ()
    return Completion(request.request_id, sample, tokens, log_probs, (version,) * len(tokens), reason, stop, raw, drawn, top, prompt, timing)


def _ended(where: str, request: Request, output: Output) -> tuple[tuple[int, ...], str, int | str | None]:
    """(tokens, finish reason, stop reason). A sample that ran past a stop id (the samplers stop at their end_id for certain) ends there."""
    tokens, s = output.token_ids, request.sampling
    first = next((i for i, token in enumerate(tokens) if token in s.stop_token_ids and i + 1 >= max(s.min_tokens, 1)), None)
    if first is not None:
        return tokens[:first + 1], "stop", tokens[first]
    reason = FINISH.get(output.finish_reason)
    if reason is None:
        raise EngineRefuses(f"{where}: TensorRT-LLM ended it as {output.finish_reason!r}, which this driver does not know")
    if reason == "stop":
        raise EngineRefuses(f"{where}: TensorRT-LLM stopped it and left the stop token out of the sample ({len(tokens)} tokens, stop ids "
                            f"{list(s.stop_token_ids)}); its log-prob is lost. Set rollout.tensorrt_llm.sampler to the other sampler, and run "
                            "benchmarks/trtllm_smoke.py")
    return tokens, reason, None


def look_up(where: str, tokens: Sequence[int], positions: Sequence[dict[int, float]]) -> tuple[float, ...]:
    """The log-prob of every token. Raises EngineRefuses where one is missing."""
    if len(positions) < len(tokens):
        raise EngineRefuses(f"{where}: TensorRT-LLM returned {len(tokens)} tokens with log-probs of {len(positions)}")
    missing = [i for i, token in enumerate(tokens) if token not in positions[i]]
    if missing:
        raise EngineRefuses(f"{where}: TensorRT-LLM's log-probs at position {missing[0]} do not have the token drawn there, {tokens[missing[0]]} "
                            f"(they have {sorted(positions[missing[0]])})")
    return tuple(positions[i][token] for i, token in enumerate(tokens))


def _from_logits(where: str, tokens: Sequence[int], logits: torch.Tensor | None, temperature: float) -> tuple[float, ...]:
    if logits is None or logits.shape[0] < len(tokens):
        raise EngineRefuses(f"{where}: log-probs at temperature {temperature} are recomputed from logits, but TensorRT-LLM returned "
                            f"{'none' if logits is None else f'{logits.shape[0]} rows for {len(tokens)} tokens'}")
    scaled = torch.log_softmax(logits[:len(tokens)].double() / temperature, -1)
    return tuple(scaled.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist())


def _prompt(where: str, request: Request, output: Output) -> tuple[float, ...]:
    """From the second prompt token on. TensorRT-LLM's list may begin with a place for the first token, and end with one for the answer's."""
    ids, positions = request.prompt_ids[1:], list(output.prompt_log_probs)
    if positions and len(positions) > len(ids) and not positions[0]:
        positions = positions[1:]
    return look_up(f"{where}, prompt", ids, positions)
