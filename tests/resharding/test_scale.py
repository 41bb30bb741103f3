"""Plans for hundreds and thousands of ranks, without weights: every rank gets exactly its layout, and the senders share the work."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from parallel.config import ParallelConfig
from parallel.model_config import ModelConfig
from resharding.layout import canonical_blocks
from resharding.layouts import mcore_party, trtllm_party
from resharding.layouts.mcore import McoreParty
from resharding.layouts.trtllm import TrtllmParty
from resharding.plan import make_plan
from resharding.traffic import Traffic, traffic

QWEN3_235B: dict[str, Any] = dict(
    model_type="qwen3_moe", hidden_size=4096, intermediate_size=12288, num_hidden_layers=94, num_attention_heads=64, num_key_value_heads=4,
    head_dim=128, vocab_size=151936, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=1536, norm_topk_prob=True,
    rope_theta=1e6, max_position_embeddings=40960, tie_word_embeddings=False)
DEEPSEEK_V3: dict[str, Any] = dict(
    model_type="deepseek_v3", hidden_size=7168, intermediate_size=18432, num_hidden_layers=61, num_attention_heads=128, num_key_value_heads=128,
    vocab_size=129280, n_routed_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048, n_shared_experts=1, first_k_dense_replace=3,
    n_group=8, topk_group=4, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    rope_theta=10000, max_position_embeddings=163840, tie_word_embeddings=False)


def qwen3_235b(layers: int, first: int, last: int) -> tuple[ModelConfig, McoreParty, TrtllmParty]:
    """TP4 PP8 EP16 on 128 ranks -> TP8 x 16 replicas on the same ranks."""
    model = ModelConfig.from_hf({**QWEN3_235B, "num_hidden_layers": layers})
    parallel = ParallelConfig(tp=4, pp=8, ep=16, etp=1, first_stage_layers=first, last_stage_layers=last, sequence_parallel=True)
    replicas = tuple(tuple(range(8 * i, 8 * i + 8)) for i in range(16))
    return model, mcore_party(model, parallel, 128, torch.bfloat16), trtllm_party(model, replicas, torch.bfloat16)


def deepseek_v3(layers: int, first: int, last: int) -> tuple[ModelConfig, McoreParty, TrtllmParty]:
    """TP1 PP16 EP64 on 1,024 ranks -> TP16 EP16 x 32 replicas on half of them."""
    model = ModelConfig.from_hf({**DEEPSEEK_V3, "num_hidden_layers": layers})
    parallel = ParallelConfig(pp=16, ep=64, first_stage_layers=first, last_stage_layers=last)
    replicas = tuple(tuple(range(16 * i, 16 * i + 16)) for i in range(32))
    return model, mcore_party(model, parallel, 1024, torch.bfloat16), trtllm_party(model, replicas, torch.bfloat16, moe_ep=16)


def check(model: ModelConfig, source: McoreParty, destination: TrtllmParty, ranks: list[int]) -> Traffic:
    blocks = canonical_blocks(model)
    moved = traffic(source, destination, blocks)
    per_stage = len(source.ranks) // source.parallel.pp
    stages = [range(i, i + per_stage) for i in range(0, len(source.ranks), per_stage)]
    assert moved.imbalance(stages) <= 1.1, "ranks that can stand in for each other share the sending"
    assert moved.sent.total() == sum(moved.received(rank) for rank in destination.ranks)
    for rank in ranks:
        plan = make_plan(source, destination, blocks, rank=rank)
        assert (plan.bytes_sent[rank], plan.bytes_received[rank]) == (moved.sent[rank], moved.received(rank)), "a rank alone plans its part of the whole"
        if rank in destination.ranks:
            held = destination.layout(rank).nbytes - padding(destination, rank)
            assert plan.bytes_written == held
            assert moved.received(rank) == held - moved.local[rank], "what is received is the layout without what is there already"
            assert moved.local[rank] == common_bytes(source, destination, rank), "what the rank has itself does not travel"
    return moved


def padding(party: TrtllmParty, rank: int) -> int:
    """Bytes of a rank's tensors that belong to no canonical tensor."""
    return sum(math.prod(stop - start for start, stop in piece.region) * tensor.dtype.itemsize
               for tensor in party.layout(rank).tensors for piece in tensor.pieces if piece.canonical is None)


def common_bytes(source: McoreParty, destination: TrtllmParty, rank: int) -> int:
    """Bytes of the rank's engine tensors that its trainer tensors hold too, from the two layouts alone."""
    mine = {}
    for tensor in source.layout(rank).tensors:
        for piece in tensor.pieces:
            mine.setdefault(piece.canonical, []).append(piece.region)
    total = 0
    for tensor in destination.layout(rank).tensors:
        for piece in tensor.pieces:
            for region in set(mine.get(piece.canonical, ())) if piece.canonical else ():
                sides = [min(b, d) - max(a, c) for (a, b), (c, d) in zip(region, piece.region)]
                total += math.prod(max(0, side) for side in sides) * tensor.dtype.itemsize
    return total


def test_every_rank_of_a_qwen3_235b_of_few_layers_gets_its_layout() -> None:
    check(*qwen3_235b(8, 1, 1), ranks=[0, 21, 64, 127])


def test_every_rank_of_a_deepseek_v3_of_few_layers_gets_its_layout() -> None:
    check(*deepseek_v3(19, 4, 1), ranks=[0, 511, 700])


@pytest.mark.slow
def test_the_whole_qwen3_235b_on_128_ranks() -> None:
    moved = check(*qwen3_235b(94, 11, 11), ranks=[0, 60])
    assert moved.imbalance([range(128)]) <= 1.1, "stages of 11 and 12 layers differ by less than a tenth"


@pytest.mark.slow
def test_the_whole_deepseek_v3_on_1024_ranks() -> None:
    check(*deepseek_v3(61, 3, 2), ranks=[300, 900])
