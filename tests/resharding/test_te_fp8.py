"""Transformer Engine's FP8 weights, as stand-ins written by hand from its sources: taken apart, they are the same weights.

This is a contract with what those sources say. It has not been run against Transformer Engine, which needs a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel.config import ParallelConfig
from parallel.errors import UserError
from resharding.fp8 import dequantise
from resharding.layout import canonical_blocks, check_tensors, empty_tensors
from resharding.layouts import mcore_party, trtllm_party
from resharding.layouts.fp8 import fp8_blocks, fp8_party, fp8_weights
from resharding.layouts.te_fp8 import extra_state, opened, stored_tensors, taken_apart
from resharding.plan import make_plan
from resharding.transport import in_place
from tests.resharding.direct import canonical_tensors, mcore_shard, tiny, trtllm_shard

E4M3 = "DType.kFloat8E4M3"
CPP = "DType.kFloat8E5M2"


def codes_of(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """uint8 codes, with the scale of every element given."""
    return (weight / scale).to(torch.float8_e4m3fn).view(torch.uint8)


def power_of_2(amax: torch.Tensor) -> torch.Tensor:
    """Transformer Engine's default: the least power of 2 with which the largest code does not pass 448."""
    return torch.exp2(torch.ceil(torch.log2(amax.clamp(min=1e-30) / 448)))


def blockwise(weight: torch.Tensor, rowwise: bool = True, columnwise: bool = True) -> Any:
    """Float8BlockwiseQTensor of a weight, 128 x 128."""
    m, k = weight.shape[0] // 128, weight.shape[1] // 128
    scale = power_of_2(weight.float().view(m, 128, k, 128).abs().amax((1, 3)))
    codes = codes_of(weight.float(), scale.repeat_interleave(128, 0).repeat_interleave(128, 1))
    pad = torch.nn.functional.pad
    return SimpleNamespace(_fp8_dtype=E4M3, _is_2D_scaled=True, shape=weight.shape, dtype=torch.bfloat16,
                           _rowwise_data=codes if rowwise else None,
                           _rowwise_scale_inv=pad(scale, (0, -k % 4), value=float("nan")) if rowwise else None,
                           _columnwise_data=codes.T.contiguous() if columnwise else None,
                           _columnwise_scale_inv=pad(scale.T, (0, -m % 4), value=float("nan")) if columnwise else None)


def vectorwise(weight: torch.Tensor) -> Any:
    """Float8BlockwiseQTensor, 1 x 128: scales are stored [columns / 128, rows up to 4s]."""
    m, k = weight.shape
    scale = power_of_2(weight.float().view(m, k // 128, 128).abs().amax(2))
    return SimpleNamespace(_fp8_dtype=E4M3, _is_2D_scaled=False, _rowwise_data=codes_of(weight.float(), scale.repeat_interleave(128, 1)),
                           _rowwise_scale_inv=torch.nn.functional.pad(scale.T, (0, -m % 4)), _columnwise_data=None, _columnwise_scale_inv=None)


def per_tensor(weight: torch.Tensor, only_transpose: bool = False) -> Any:
    """Float8Tensor."""
    scale = (weight.float().abs().max() / 448).reshape(1)
    codes = codes_of(weight.float(), scale)
    return SimpleNamespace(_fp8_dtype=E4M3, _data=None if only_transpose else codes, _transpose=codes.T.contiguous(), _scale_inv=scale)


def mxfp8(weight: torch.Tensor) -> Any:
    """MXFP8Tensor: exponents plus 127, padded to 128 rows and 4 columns."""
    m, k = weight.shape
    exponent = torch.ceil(torch.log2(weight.float().view(m, k // 32, 32).abs().amax(2) / 448))
    codes = codes_of(weight.float(), torch.exp2(exponent).repeat_interleave(32, 1))
    stored = torch.nn.functional.pad((exponent + 127).to(torch.uint8), (0, -(k // 32) % 4, 0, -m % 128))
    return SimpleNamespace(_fp8_dtype=E4M3, _rowwise_data=codes, _rowwise_scale_inv=stored, _columnwise_data=codes,
                           _columnwise_scale_inv=torch.zeros(-(-m // 32 // 4) * 4, -(-k // 128) * 128, dtype=torch.uint8))


WEIGHT = torch.randn(384, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
STAND_INS = {"delayed": per_tensor, "tensorwise": per_tensor, "blockwise": blockwise, "mxfp8": mxfp8}


@pytest.mark.parametrize("recipe", STAND_INS)
def test_the_described_tensors_are_those_of_the_stand_ins(recipe: Any) -> None:
    held = vars(STAND_INS[recipe](WEIGHT))
    described = stored_tensors(recipe, (384, 256))
    assert {n: (held[n].dtype, tuple(held[n].shape)) for n in described} == described
    assert {n for n, value in held.items() if isinstance(value, torch.Tensor)} == set(described)
    assert set(stored_tensors(recipe, (384, 256), transpose=False)) < set(described)


def test_shapes_by_hand() -> None:
    assert stored_tensors("blockwise", (640, 7168)) == {
        "_rowwise_data": (torch.uint8, (640, 7168)), "_rowwise_scale_inv": (torch.float32, (5, 56)),
        "_columnwise_data": (torch.uint8, (7168, 640)), "_columnwise_scale_inv": (torch.float32, (56, 8))}
    assert stored_tensors("mxfp8", (96, 160))["_rowwise_scale_inv"] == (torch.uint8, (128, 8))
    assert stored_tensors("mxfp8", (96, 160))["_columnwise_scale_inv"] == (torch.uint8, (4, 256))
    for recipe, shape in (("blockwise", (576, 7168)), ("mxfp8", (48, 64))):
        with pytest.raises(UserError, match=f"fp8_recipe {recipe} cannot hold a shard of {shape[0]} x {shape[1]}"):
            stored_tensors(recipe, shape)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="fp8_recipe 'nvfp4' is not known"):
        stored_tensors("nvfp4", (128, 128))  # type: ignore[arg-type]


def test_only_delayed_scaling_has_extra_state() -> None:
    state = extra_state("delayed", num_gemms=4, history=16)
    assert state["scale_fwd"] == (torch.float32, (12,)) and state["amax_history_bwd"] == (torch.float32, (16, 8))
    assert not any(extra_state(recipe) for recipe in ("tensorwise", "blockwise", "mxfp8"))  # type: ignore[arg-type]


def test_what_is_taken_apart_is_the_same_weight() -> None:
    for made, block in ((blockwise(WEIGHT), (128, 128)), (blockwise(WEIGHT, rowwise=False), (128, 128)), (vectorwise(WEIGHT), (1, 128)),
                        (per_tensor(WEIGHT), (128, 128)), (per_tensor(WEIGHT, only_transpose=True), (128, 128)), (mxfp8(WEIGHT), (1, 32))):
        codes, scale, size = taken_apart(made)
        assert size == block and codes.shape == WEIGHT.shape and codes.dtype == torch.float8_e4m3fn
        back = dequantise(codes, scale, block, torch.float32)
        largest = WEIGHT.float().abs().max()
        assert bool(((back - WEIGHT.float()).abs() <= WEIGHT.float().abs() / 16 + largest / 448 * 2 ** -9).all())
    made = blockwise(WEIGHT)
    codes, scale, _ = taken_apart(made)
    assert codes.data_ptr() == made._rowwise_data.data_ptr() and scale.data_ptr() == made._rowwise_scale_inv.data_ptr()


def test_what_cannot_be_read_is_refused_by_name() -> None:
    for change, message in (({"_fp8_dtype": CPP}, "must be e4m3"), ({"_with_gemm_swizzled_scales": True}, "laid out for a product"),
                            ({"_data_format": "Float8BlockScaleTensorFormat.COMPACT"}, "laid out for a product")):
        with pytest.raises(UserError, match=f"^layer.weight: .*{message}"):
            taken_apart(SimpleNamespace(**{**vars(blockwise(WEIGHT)), **change}), "layer.weight")
    for made, message in ((SimpleNamespace(**{**vars(vectorwise(WEIGHT)), "_rowwise_data": None}), "only the codes for the backward"),
                          (SimpleNamespace(**{**vars(mxfp8(WEIGHT)), "_rowwise_data": None}), "only the codes for the backward")):
        with pytest.raises(UserError, match=f"^layer.weight: .*{message}"):
            taken_apart(made, "layer.weight")
    with pytest.raises(UserError, match=r"layer.weight: its scales are of blocks of 1 x 32.*fp8_recipe blockwise"):
        opened({"layer.weight": mxfp8(WEIGHT)})


@pytest.mark.parametrize("make", [blockwise, per_tensor])
def test_a_trainer_with_fp8_weights_feeds_an_fp8_engine_without_bf16_in_between(make: Any) -> None:
    """Codes and scales arrive as they are stored; query groups are taken apart by whole blocks."""
    model = tiny(hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=2, head_dim=128, num_layers=1)
    weights, blocks = fp8_weights(model), canonical_blocks(model)
    par, full = ParallelConfig(), canonical_tensors(model, torch.bfloat16)
    source = fp8_party(mcore_party(model, par, 1, torch.bfloat16, "te"), weights, len(blocks))
    names = ("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight")
    stored = {n: make(t) if n.endswith(names) else t for n, t in mcore_shard(full, model, par, 0, 1, "te").items()}
    held = opened(stored)
    check_tensors(source.layout(0), held)
    engine = fp8_party(trtllm_party(model, ((0,),), torch.bfloat16), weights, len(blocks))
    arrived = empty_tensors(engine.layout(0))
    in_place.execute(make_plan(source, engine, fp8_blocks(blocks, weights)), held, arrived)
    expected = trtllm_shard(full, model, 1, 0)
    prefix, local = "model.layers.0.", "decoder.layers.0."
    for name, key in (("self_attn.o_proj.weight", "self_attention.linear_proj.weight"), ("mlp.gate_up_proj.weight", "mlp.linear_fc1.weight"),
                      ("mlp.down_proj.weight", "mlp.linear_fc2.weight")):
        for end in ("", "_scale_inv"):
            assert torch.equal(arrived[prefix + name + end].view(torch.uint8), held[local + key + end].contiguous().view(torch.uint8))
    for name, tensor in expected.items():
        if name + "_scale_inv" in arrived:
            back = dequantise(arrived[name], arrived[name + "_scale_inv"], dtype=torch.float32)
            assert bool(((back - tensor.float()).abs() <= tensor.float().abs() / 16 + tensor.float().abs().max() / 448 * 2 ** -9).all()), name
        else:
            assert torch.equal(arrived[name], tensor)
