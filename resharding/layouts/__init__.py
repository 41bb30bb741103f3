"""The layout of every party: HF files, Megatron-Core ranks, TensorRT-LLM ranks.

Families say how a parameter is cut and fused (`Parameter.kind`); these files alone know what each kind means in each layout.
"""

from resharding.layouts.hf import hf_layout
from resharding.layouts.mcore import mcore_layout, mcore_party
from resharding.layouts.trtllm import trtllm_layout, trtllm_party

__all__ = ["hf_layout", "mcore_layout", "mcore_party", "trtllm_layout", "trtllm_party"]
