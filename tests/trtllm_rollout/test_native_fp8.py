"""FP8 products: by dequantising, and by the device's own product where it can be trusted. No test machine has one: it is stood in for."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tests.resharding.test_fp8 import by_hand
from trtllm_rollout.embedded import native_fp8
from trtllm_rollout.embedded.linear import Linear, linear

CPU = torch.device("cpu")


def weight(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and the values they stand for."""
    codes, scale = by_hand(torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)))
    return codes, scale, codes.float() * scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]


@pytest.mark.parametrize("shape", [(256, 128), (40, 200), (130, 64)])
def test_a_product_with_codes_is_the_product_with_their_values(shape: tuple[int, int]) -> None:
    codes, scale, values = weight(*shape)
    x, bias = torch.randn(7, shape[1]), torch.randn(shape[0])
    torch.testing.assert_close(linear(x, Linear(codes, scale, bias)), x @ values.T + bias, rtol=1e-4, atol=1e-4)
    assert torch.equal(linear(x[:1], Linear(codes, scale, bias)), linear(x, Linear(codes, scale, bias))[:1])


def scaled_mm(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype, **unused: Any) -> torch.Tensor:
    """What `torch._scaled_mm` documents of 1 x 128 by 128 x 128 scales: a row-major, b column-major, scale_a column-major."""
    assert a.is_contiguous() and b.T.is_contiguous() and scale_a.T.is_contiguous() and a.dtype == b.dtype == torch.float8_e4m3fn
    assert scale_a.shape == (a.shape[0], a.shape[1] // 128) and scale_b.shape == (b.shape[0] // 128, b.shape[1] // 128)
    wide = scale_b.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return ((a.float() * scale_a.repeat_interleave(128, 1)) @ (b.float() * wide)).to(out_dtype)


def test_scales_are_handed_over_as_the_product_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    codes, scale, values = weight(256, 384)
    x = torch.randn(5, 384, generator=torch.Generator().manual_seed(2)) * torch.tensor([1e-3, 1, 50, 1, 1])[:, None]
    x[4, 128:256] = 0
    found, expected = native_fp8._product(x, codes, scale), x @ values.T
    assert float(((found - expected).abs() / expected.abs().amax(1, keepdim=True)).max()) < native_fp8.TOLERANCE


def test_a_device_without_the_product_or_with_a_wrong_one_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def trusted(product: Any) -> bool:
        monkeypatch.setattr(torch, "_scaled_mm", product)
        return native_fp8.gives_block_products(CPU)

    def refuses(*arguments: Any, **named: Any) -> torch.Tensor:
        raise RuntimeError("blockwise scaling needs compute capability 9.0")

    with caplog.at_level(logging.INFO):
        assert trusted(scaled_mm)
        assert not trusted(refuses)
        assert not trusted(lambda *arguments, **named: 2 * scaled_mm(*arguments, **named))
        assert not trusted(lambda *arguments, **named: scaled_mm(*arguments, **named) * float("nan"))
    assert "compute capability 9.0" in caplog.text and "off by" in caplog.text
    assert native_fp8.native_block_product(torch.zeros(4, 128), *weight(128, 128)[:2]) is None
