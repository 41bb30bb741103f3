"""What each active slot is generating, as arrays over slots, so that a step costs no Python per sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trtllm_rollout.embedded.sampling import uniforms
from trtllm_rollout.protocol import Request


class Sequences:
    """Arrays [slots] or [slots, tokens]; row i belongs to slot i of the KV cache. Capacity grows, contents stay."""

    def __init__(self) -> None:
        self.prompt_length = np.zeros(0, np.int64)
        self.generated = np.zeros(0, np.int64)
        self.max_tokens = np.zeros(0, np.int64)
        self.temperature = np.zeros(0, np.float64)
        self.top_k = np.zeros(0, np.int64)
        self.top_p = np.zeros(0, np.float64)
        self.stops = np.zeros((0, 0), np.int64)  # padded with -1, which is no token
        self.tokens = np.zeros((0, 0), np.int64)
        self.log_probs = np.zeros((0, 0), np.float64)
        self.uniforms = np.zeros((0, 0), np.float64)

    def reserve(self, slots: int, tokens: int, stops: int) -> None:
        """Room for `slots` samples of at most `tokens` generated tokens and `stops` stop ids."""
        slots = max(slots, len(self.generated))
        for name, array in vars(self).items():
            width = () if array.ndim == 1 else (max(array.shape[1], stops if name == "stops" else tokens),)
            if array.shape != (slots, *width):
                grown = np.full((slots, *width), -1 if name == "stops" else 0, array.dtype)
                grown[tuple(slice(n) for n in array.shape)] = array
                setattr(self, name, grown)

    def assign(self, slot: int, request: Request, sample: int) -> None:
        """Begin sample `sample` of `request` in `slot`."""
        sampling = request.sampling
        self.prompt_length[slot], self.generated[slot] = len(request.prompt_ids), 0
        self.max_tokens[slot], self.temperature[slot] = sampling.max_tokens, sampling.temperature
        self.top_k[slot], self.top_p[slot] = sampling.top_k, sampling.top_p
        self.stops[slot] = -1
        self.stops[slot, :len(sampling.stop_token_ids)] = sampling.stop_token_ids
        if sampling.temperature > 0:
            self.uniforms[slot, :sampling.max_tokens] = uniforms(request.stream, sample, sampling.max_tokens)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for array in vars(self).values():
            array[list(targets)] = array[list(sources)]

    def fresh(self, active: int) -> np.ndarray:
        """Slots, of the first `active`, that have no token yet."""
        return np.flatnonzero(self.generated[:active] == 0)

    def append(self, slots: np.ndarray, ids: np.ndarray, log_probs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Add one token to each of `slots`. Returns (slots that are finished, whether each of them met a stop id)."""
        at = self.generated[slots]
        self.tokens[slots, at], self.log_probs[slots, at] = ids, log_probs
        self.generated[slots] = at + 1
        stopped = (self.stops[slots] == ids[:, None]).any(1)
        done = stopped | (at + 1 >= self.max_tokens[slots])
        return slots[done], stopped[done]

    def last_tokens(self, active: int) -> np.ndarray:
        """The newest token of the first `active` slots, not yet in the KV cache."""
        return self.tokens[np.arange(active), self.generated[:active] - 1]

    def cached(self, active: int) -> np.ndarray:
        """Tokens in the KV cache of the first `active` slots: the prompt and all generated tokens but the newest."""
        return self.prompt_length[:active] + np.maximum(self.generated[:active] - 1, 0)
