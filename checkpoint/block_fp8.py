"""Block-quantised FP8 tensors of Hugging Face directories: e4m3 codes `X` and one scale per block `X_scale_inv`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from resharding.fp8 import dequantise_region


@dataclass(frozen=True)
class BlockQuantised:
    """codes [..., rows, columns], scales [..., ceil(rows / block), ceil(columns / block)]; gives values in `dtype` when sliced."""

    codes: Tensor
    scales: Tensor
    block: tuple[int, int]
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def __getitem__(self, key: Any) -> Tensor:
        """The values of a region, code x scale in float32, rounded once. Rows and columns are sliced with step 1."""
        keys = list(key) if isinstance(key, tuple) else [key]
        *stack, rows, columns = keys + [slice(None)] * (self.codes.dim() - len(keys))
        codes, scales = self.codes[(*stack, rows, columns)], self.scales[tuple(stack)]
        region = tuple((range(size)[part].start, range(size)[part].stop) for part, size in zip((rows, columns), self.codes.shape[-2:], strict=True))
        if codes.dim() == 2:
            return dequantise_region(codes, scales, region, self.block, self.dtype)
        values = torch.empty(codes.shape, dtype=self.dtype)
        for place in itertools.product(*map(range, codes.shape[:-2])):
            values[place] = dequantise_region(codes[place], scales[place], region, self.block, self.dtype)
        return values
