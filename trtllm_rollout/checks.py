"""What every engine refuses, and on what the ranks of one engine must agree: the same words whichever engine it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from parallel.errors import UserError, nearest
from parallel.model_config import ModelConfig
from trtllm_rollout.protocol import Request

TAGS = ("kv_cache", "weights")


class RankState(NamedTuple):
    """One rank's view of its engine. `submitted`: a running hash of all requests; `asleep`: tags; `busy`: it has unfinished work."""

    refusal: str
    version: int | None
    submitted: int
    asleep: list[str]
    busy: bool


def asleep(states: Sequence[RankState]) -> str | None:
    """Why ranks that sleep cannot generate; None where all are awake."""
    tags = next((s.asleep for s in states if s.asleep), None)
    return f"{' and '.join(tags)} asleep; wake first" if tags else None


def disagreement(states: Sequence[RankState]) -> str | None:
    """How the ranks differ in version or work; None where they do not."""
    if len({(s.version, s.submitted) for s in states}) == 1:
        return None
    work = "differ" if len({s.submitted for s in states}) > 1 else "equal"
    return (f"ranks disagree: versions {[s.version for s in states]}, requests {work}; every rank must commit the same version "
            "and submit the same requests")


def check_prompt(request: Request, model: ModelConfig, max_seq_len: int) -> None:
    """Refuse a request that is too long or of another vocabulary. Raises UserError with the numbers."""
    name, count, more = f"request {request.request_id}", len(request.prompt_ids), request.sampling.max_tokens
    if count + more > max_seq_len:
        raise UserError(f"{name}: {count} prompt tokens + max_tokens {more} = {count + more} exceed the engine's {max_seq_len} "
                        f"(the model's max_position_embeddings: {model.max_position_embeddings}); shorten the prompt or lower max_tokens")
    for token in (min(request.prompt_ids), max(request.prompt_ids)):
        if not 0 <= token < model.vocab_size:
            raise UserError(f"{name}: prompt id {token} is outside the vocabulary of {model.vocab_size}; was it tokenized for another model?")


def check_tags(tags: Sequence[str]) -> list[str]:
    """The tags of sleep or wake as a list; one tag is as good as a list of it. Raises UserError for one that does not exist."""
    tags = [tags] if isinstance(tags, str) else list(tags)
    for tag in tags:
        if tag not in TAGS:
            close = nearest(tag, TAGS)
            hint = f", did you mean {close!r}?" if close else ""
            raise UserError(f"engine sleep/wake: unknown tag {tag!r}{hint}; allowed: a list of {', '.join(TAGS)}")
    return tags
