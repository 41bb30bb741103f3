"""FP8 layouts, derived from any other: chosen matrices become e4m3 codes, each beside a tensor of its block scales.

Canonical tensors are extended by `<canonical>_scale_inv`, [ceil(rows / 128), ceil(columns / 128)] in float32, so that plans, transports
and checksums treat scales as they treat any tensor. `fp8_party` is for a side that stores FP8 (an engine; a trainer with FP8 primary
weights); `scaled_party` is for a trainer in bf16 or fp32 that makes the codes on the way (`resharding.transform.Fp8Source`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import torch

from parallel.errors import UserError
from parallel.model_config import ModelConfig
from resharding.boxes import Box, at, first_overlap, shape_of, whole
from resharding.fp8 import BLOCK, E4M3, SUFFIX, Block, grid_shape, touched
from resharding.layout import Layout, LocalTensor, Party, Piece, Shard, canonical_blocks, parameters_of, in_layer
