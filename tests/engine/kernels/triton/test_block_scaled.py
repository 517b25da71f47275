"""Torch's products of fp8 in blocks: their arguments, and the fallback after a refusal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from tidemill.engine.kernels.linear import Fp8Linear
from tidemill.engine.kernels.quantised import BLOCK, FP8, Quantised
from tidemill.engine.kernels.triton import block_scaled, fp8, linear

# Five blocks of inputs: cuBLAS reads scales of eight.
OUTPUTS, INPUTS = 2 * BLOCK, 5 * BLOCK


@pytest.fixture(name="weight")
def fixture_weight(monkeypatch: pytest.MonkeyPatch) -> Quantised:
    """Return a weight in blocks, on a device with torch's products."""
    monkeypatch.setattr(block_scaled, "ARCHITECTURES", {"interpreter"})
    monkeypatch.setattr(block_scaled, "MANY_ROWS", 20)
    block_scaled._log.cache_clear()
    scales = (torch.rand(OUTPUTS // BLOCK, INPUTS // BLOCK) + 0.5).repeat_interleave(BLOCK, 0)
    numbers = torch.randn(OUTPUTS, INPUTS).to(FP8)
    return Quantised(numbers, scales, None, INPUTS, BLOCK, torch.float16)


def as_cublas(  # noqa: PLR0917 - as scaled_mm takes them
    x: Tensor,
    weight: Tensor,
    of_rows: Tensor,
    recipe: Any,
    of_blocks: Tensor,
    block_recipe: Any,
    output_dtype: torch.dtype,
) -> Tensor:
    """Return the data that cuBLAS would read, after torch's own checks for CUDA."""
    on_meta = [tensor.to("meta") for tensor in (x, weight, of_rows, of_blocks)]
    given = dict(zip(("mat_a", "mat_b", "scale_a", "scale_b"), on_meta, strict=True))
    recipes = {"scale_recipe_a": recipe, "scale_recipe_b": block_recipe}
    scaled_mm(**given, **recipes, output_dtype=output_dtype)
    assert recipe == ScalingType.BlockWise1x128
    assert block_recipe == ScalingType.BlockWise128x128
    assert len(x) % 16 == 0
    blocks = range(0, x.shape[1], BLOCK)
    total = torch.zeros(len(x), weight.shape[1], dtype=torch.float64)
    flat = of_blocks.T.flatten()  # as it is stored
    for index, first in enumerate(blocks):
        own = slice(first, first + BLOCK)
        at = torch.arange(weight.shape[1] // BLOCK) * (-(-len(blocks) // 4) * 4) + index
        scales = flat[at].repeat_interleave(BLOCK)
        total += (x[:, own].double() @ weight[own].double()) * of_rows[:, index, None] * scales
    return total.to(output_dtype)


def test_many_rows_are_torchs_and_few_are_our_tiles(
    weight: Quantised, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales have cuBLAS's layout for any number of rows; we add the bias."""
    monkeypatch.setattr(torch._meta_registrations, "device_hint", lambda _: "cuda")
    counts = []

    def counted(x: Tensor, *given: Any, **named: Any) -> Tensor:
        counts.append(len(x))
        return as_cublas(x, *given, **named)

    monkeypatch.setattr(block_scaled, "scaled_mm", counted)
    bias = torch.randn(OUTPUTS).half()
    layer = linear.prepare_fp8(weight, bias)
    assert isinstance(layer, Fp8Linear)
    checked = len(counts)
    for rows in (19, 21):
        x = torch.randn(rows, INPUTS).half()
        expected = fp8.multiply(layer.ops.quantise_fp8(x, BLOCK), fp8.prepare(weight), bias)
        torch.testing.assert_close(layer(x), expected, atol=0.5, rtol=0.01)
    assert counts[checked:] == [32]


@pytest.mark.parametrize("way", ["raises", "differs", "NaN"])
def test_products_that_torch_refuses_or_gets_wrong_use_our_tiles(
    way: str, weight: Quantised, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A torch of an older CUDA, or scales that are read otherwise; it is logged once."""

    def other(*given: Any, **named: Any) -> Tensor:
        if way == "raises":
            raise NotImplementedError("requires cublasLt >= 12.9")
        return as_cublas(*given, **named) * (1.1 if way == "differs" else torch.nan)

    monkeypatch.setattr(block_scaled, "scaled_mm", other)
    for _ in range(2):
        assert block_scaled.prepare(fp8.prepare(weight), weight.dtype) is None
    assert len(caplog.records) == 1


def test_torch_is_not_used_for_unsupported_products(
    weight: Quantised, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Widths are not whole blocks, rows differ, or the card is another one."""
    monkeypatch.setattr(block_scaled, "scaled_mm", None)
    odd = weight.submatrix(range(200), range(INPUTS))
    assert odd is not None
    differing = replace(weight, scales=weight.scales + torch.rand(OUTPUTS, 1))
    for one in (odd, differing):
        assert block_scaled.prepare(fp8.prepare(one), weight.dtype) is None
    monkeypatch.setattr(block_scaled, "ARCHITECTURES", {"sm_90"})
    assert block_scaled.prepare(fp8.prepare(weight), weight.dtype) is None
