"""What each started sample has generated and how it draws, as arrays over rows, so that a step costs no Python per sequence."""

from __future__ import annotations

import heapq

import numpy as np

from trtllm_rollout.embedded.sampling import uniforms
from trtllm_rollout.protocol import Request

KINDS = 3  # log-probs of a token: at the temperature, raw, as drawn


class Sequences:
    """Arrays [rows] or [rows, tokens]; a sample keeps its row from its start to its end. Capacity grows, contents stay."""

    def __init__(self) -> None:
        self.generated = np.zeros(0, np.int64)
        self.reported = np.zeros(0, np.int64)  # tokens that a Progress has told of
        self.max_tokens = np.zeros(0, np.int64)
        self.min_tokens = np.zeros(0, np.int64)
        self.temperature = np.zeros(0, np.float64)
        self.top_k = np.zeros(0, np.int64)
        self.top_p = np.zeros(0, np.float64)
        self.min_p = np.zeros(0, np.float64)
        self.stops = np.zeros((0, 0), np.int64)  # padded with -1, which is no token
        self.tokens = np.zeros((0, 0), np.int64)
        self.uniforms = np.zeros((0, 0), np.float64)
        self.log_probs = np.zeros((0, 0, KINDS), np.float64)
        self.top: dict[int, list[tuple[tuple[int, float], ...]]] = {}
        self._free: list[int] = []

    def take(self, request: Request, sample: int) -> int:
        """A row for sample `sample` of `request`."""
        sampling = request.sampling
        self._reserve(sampling.max_tokens, len(sampling.stop_token_ids))
        row = heapq.heappop(self._free)
        self.generated[row] = self.reported[row] = 0
        self.max_tokens[row], self.min_tokens[row], self.temperature[row] = sampling.max_tokens, sampling.min_tokens, sampling.temperature
        self.top_k[row], self.top_p[row], self.min_p[row] = sampling.top_k, sampling.top_p, sampling.min_p
        self.stops[row] = -1
        self.stops[row, :len(sampling.stop_token_ids)] = sampling.stop_token_ids
        if sampling.temperature > 0:
            self.uniforms[row, :sampling.max_tokens] = uniforms(request.stream, sample, sampling.max_tokens)
        self.top[row] = []
        return row

    def give_back(self, row: int) -> None:
        del self.top[row]
        heapq.heappush(self._free, row)

    def append(self, rows: np.ndarray, ids: np.ndarray, log_probs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Add one token, and its `log_probs` [rows, 3], to each of `rows`. Returns for each whether it met a stop id, and whether it is full."""
        at = self.generated[rows]
        self.tokens[rows, at], self.log_probs[rows, at] = ids, log_probs
        self.generated[rows] = at + 1
        stopped = (self.stops[rows] == ids[:, None]).any(1) & (at >= self.min_tokens[rows])
        return stopped, at + 1 >= self.max_tokens[rows]

    def next_uniforms(self, rows: np.ndarray) -> np.ndarray:
        """The uniform number of the next token of each row, float64."""
        return self.uniforms[rows, self.generated[rows]] if self.uniforms.shape[1] else np.zeros(len(rows))

    def _reserve(self, tokens: int, stops: int) -> None:
        """Room for a sample of at most `tokens` tokens and `stops` stop ids, and for one more row."""
        have = len(self.generated)
        count = have if self._free else max(16, 2 * have)
        for name, array in vars(self).items():
            if not isinstance(array, np.ndarray):
                continue
            width = () if array.ndim == 1 else (max(array.shape[1], stops if name == "stops" else tokens), *array.shape[2:])
            if array.shape != (count, *width):
                grown = np.zeros((count, *width), array.dtype)  # of which only what is written takes memory
                if name == "stops":
                    grown -= 1
                grown[tuple(slice(n) for n in array.shape)] = array
                setattr(self, name, grown)
        self._free += range(have, count)
