"""The layout of every party: HF files, Megatron-Core ranks, TensorRT-LLM ranks and its classic checkpoints.

Families say how a parameter is cut and fused (`Parameter.kind`); these files alone know what each kind means in each layout.
"""

from resharding.layouts.hf import hf_layout
from resharding.layouts.mcore import mcore_layout, mcore_party
from resharding.layouts.trtllm import trtllm_layout, trtllm_party
from resharding.layouts.trtllm_engine import EngineMapping, trtllm_engine_layout

__all__ = ["EngineMapping", "hf_layout", "mcore_layout", "mcore_party", "trtllm_engine_layout", "trtllm_layout", "trtllm_party"]
