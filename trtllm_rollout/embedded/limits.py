"""What an engine takes: sizes that fit each other and the model, requests that fit the engine."""

from __future__ import annotations

from dataclasses import dataclass

from parallel.errors import UserError
from parallel.model_config import ModelConfig
from trtllm_rollout.checks import check_prompt
from trtllm_rollout.embedded.blocks import BlockPool
from trtllm_rollout.protocol import Request

MAX_NUM_TOKENS = 2048


@dataclass(frozen=True)
class Limits:
    """Sizes of an engine; `detokenizes`: it can turn ids into text, which stop strings need."""

    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    detokenizes: bool

    @staticmethod
    def checked(model: ModelConfig, max_batch_size: int, max_seq_len: int | None, max_num_tokens: int | None, block_size: int,
                detokenizes: bool) -> Limits:
        """Raises UserError for a size that does not fit."""
        if max_batch_size < 1:
            raise UserError(f"rollout: max_batch_size is {max_batch_size}; it must be at least 1")
        if block_size < 1:
            raise UserError(f"rollout: block_size is {block_size}; it must be at least 1 token")
        limit, least = model.max_position_embeddings, max_batch_size + block_size
        if max_seq_len is not None and not 1 <= max_seq_len <= limit:
            raise UserError(f"rollout: max_seq_len is {max_seq_len}; it must be between 1 and the model's max_position_embeddings {limit}")
        if max_num_tokens is not None and max_num_tokens < least:
            raise UserError(f"rollout: max_num_tokens is {max_num_tokens}; a step takes a token of each of max_batch_size {max_batch_size} samples "
                            f"and a block of {block_size} tokens of a prompt: give at least {least}")
        return Limits(max_batch_size, max_seq_len or limit, max_num_tokens or max(MAX_NUM_TOKENS, least), detokenizes)

    def check(self, request: Request, model: ModelConfig, pool: BlockPool) -> None:
        """Refuse a request that cannot be generated. Raises UserError with the numbers."""
        name, sampling = f"request {request.request_id}", request.sampling
        count, more = len(request.prompt_ids), sampling.max_tokens
        check_prompt(request, model, self.max_seq_len)
        if (blocks := pool.blocks_for(count) + pool.blocks_for(more)) > pool.count:
            raise UserError(f"{name}: {count} prompt tokens and max_tokens {more} take {blocks} blocks of {pool.block_size}, and the KV cache has "
                            f"{pool.count}; shorten the prompt, lower max_tokens or raise kv_cache_bytes")
        if sampling.stop and not self.detokenizes:
            raise UserError(f"{name}: stop strings {list(sampling.stop)} need an engine with a tokenizer (detokenize); give stop_token_ids instead")
