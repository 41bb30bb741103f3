"""What the engine refuses before it does anything."""

from __future__ import annotations

from collections.abc import Sequence

from parallel.errors import UserError, nearest
from parallel.model_config import ModelConfig
from trtllm_rollout.driver.sampling import Dialect, translate
from trtllm_rollout.protocol import Request

TAGS = ("kv_cache", "weights")


def check_request(request: Request, model: ModelConfig, max_seq_len: int, dialect: Dialect) -> None:
    """Refuse a request that cannot be generated as it is meant. Raises UserError with the numbers."""
    count, more, vocab = len(request.prompt_ids), request.sampling.max_tokens, model.vocab_size
    if count + more > max_seq_len:
        raise UserError(f"request {request.request_id}: {count} prompt tokens + max_tokens {more} = {count + more} exceed the engine's "
                        f"{max_seq_len} (the model's max_position_embeddings: {model.max_position_embeddings}); "
                        "shorten the prompt or lower max_tokens")
    for token in (min(request.prompt_ids), max(request.prompt_ids)):
        if not 0 <= token < vocab:
            raise UserError(f"request {request.request_id}: prompt id {token} is outside the vocabulary of {vocab}; "
                            "was it tokenized for another model?")
    translate(request, 0, dialect)


def check_tags(tags: Sequence[str]) -> list[str]:
    """The tags of sleep or wake as a list. Raises UserError for one that does not exist."""
    tags = [tags] if isinstance(tags, str) else list(tags)
    for tag in tags:
        if tag not in TAGS:
            close = nearest(tag, TAGS)
            hint = f", did you mean {close!r}?" if close else ""
            raise UserError(f"engine sleep/wake: unknown tag {tag!r}{hint}; allowed: a list of {', '.join(TAGS)}")
    return tags
