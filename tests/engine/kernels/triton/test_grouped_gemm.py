"""Products of many experts in one launch, against each expert's own in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.engine.kernels.triton.mutating import Mutation, assert_found, each_of
from tidemill.engine.kernels.elementwise import Gate, act_and_mul
from tidemill.engine.kernels.quantised import FP8, Quantised, pack_int4, quantise_fp8
from tidemill.engine.kernels.triton import elementwise, grouped_gemm
from tidemill.engine.kernels.triton.tuned_tiles import KernelConfig

BOUND = {torch.float32: 1e-4, torch.float16: 2e-2}
OF_GPT_OSS = Gate(alpha=1.702, limit=7.0, beta=1.0)
# Rows of each expert: none, one, a full tile, one more.
COUNTS = (0, 1, 16, 17, 0, 2)


def stops_of(counts: Sequence[int]) -> Tensor:
    """Return the end of each expert's rows."""
    return torch.tensor(counts).cumsum(0).int()


def expected(
    x: Tensor, counts: Sequence[int], weight: Tensor, bias: Tensor | None, gate: Gate | None
) -> Tensor:
    """Return each row times its expert's weight, joined by a gate."""
    owners = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    exact = (weight[owners].double() @ x.double()[..., None])[..., 0]
    if bias is not None:
        exact += bias[owners]
    return exact if gate is None else act_and_mul(exact, gate)


def assert_near(got: Tensor, exact: Tensor) -> None:
    """Compare numbers with exact ones, up to intermediate roundings to their dtype."""
    bound = BOUND[got.dtype]
    torch.testing.assert_close(got.double(), exact, atol=bound, rtol=bound)


def check_products(
    module: ModuleType,
    dtype: torch.dtype = torch.float32,
    inner: int = 48,
    width: int = 66,
    *,
    gate: Gate | None = None,
    counts: Sequence[int] = COUNTS,
) -> None:
    """Check products of gathered rows, with a bias."""
    experts, rows = len(counts), sum(counts)
    weight = (torch.randn(experts, width, inner) / inner**0.5).to(dtype)
    bias, x = torch.randn(experts, width).to(dtype), torch.randn(40, inner).to(dtype)
    tokens = torch.randint(0, 40, (rows,), dtype=torch.int32)
    got = module.grouped_linear(x, tokens, weight, bias, stops_of(counts), gate)
    assert got.dtype == dtype
    assert_near(got, expected(x[tokens], counts, weight, bias, gate))


def check_uneven(module: ModuleType) -> None:
    """Check products that end within a block of inputs."""
    check_products(module, inner=33)


def check_gates(module: ModuleType) -> None:
    """Check products that are joined by gates."""
    check_products(module, gate=Gate())


def check_order(module: ModuleType) -> None:
    """Check products whose programs take groups of tiles, the last of them a smaller one."""
    with pytest.MonkeyPatch.context() as patch:
        sizes = {"ROWS": 16, "COLUMNS": 32, "INNER": 16, "TILES": 2}
        patch.setattr(module, "_config_for", lambda *_, **__: KernelConfig(sizes, 4, 1))
        check_products(module, counts=(1, 17, 1, 0, 1))


def check_few_bits(module: ModuleType, gate: Gate | None = None) -> None:
    """Check products with quantised experts, of four bits and of eight, rows gathered or not.

    With a gate the four bits are fp4, as in gpt-oss, and NVFP4.
    """
    x, tokens = torch.randn(40, 136), torch.randint(0, 40, (36,), dtype=torch.int32)
    numbers = torch.randint(0, 16, (6, 66, 136), dtype=torch.uint8)
    scales, zeros = torch.rand(6, 66, 5) / 9, torch.randint(0, 16, (6, 66, 5), dtype=torch.uint8)
    four = Quantised(pack_int4(numbers), scales, zeros, 136, 32, torch.float64)
    if gate is not None:
        powers = torch.randint(118, 122, (6, 66, 5), dtype=torch.uint8)
        four = replace(four, scales=powers, zeros=None)
    eight = replace(quantise_fp8(torch.randn(6, 66, 136)), dtype=torch.float64)
    weights: list[tuple[Quantised, Tensor | None, Tensor | None]]
    weights = [(four, tokens, torch.randn(6, 66)), (eight, None, None)]
    if gate is not None:
        scales = (torch.rand(6, 66, 9) / 9).to(FP8)
        rows = torch.rand(6, 66, 1) + 0.5
        weights.append((replace(four, scales=scales, group=16, row_scales=rows), None, None))
    for weight, named, bias in weights:
        own = x[:36] if named is None else x[named]
        exact = expected(own, COUNTS, weight.dequantised(), bias, gate)
        kept = replace(weight, dtype=torch.float32)
        got = module.grouped_quantised(
            own if named is None else x, named, kept, bias, stops_of(COUNTS), gate
        )
        assert (got - exact).abs().max() <= 1e-5 * exact.abs().max()


def check_wide(module: ModuleType) -> None:
    """Check products of a tile with many rows."""
    with pytest.MonkeyPatch.context() as patch:
        sizes = {"ROWS": 128, "OUTPUTS": 64, "TILES": 1}
        patch.setattr(module, "_config_for", lambda *_, **__: KernelConfig(sizes, 4, 1))
        check_few_bits(module)


def check_few_bits_gates(module: ModuleType) -> None:
    """Check the same with gates."""
    check_few_bits(module, OF_GPT_OSS)


def check_fp8(module: ModuleType, gate: Gate | None = None) -> None:
    """Compare fp8 products with those of dequantised numbers, by rows and by groups."""
    x, tokens = torch.randn(40, 272), torch.randint(0, 40, (36,), dtype=torch.int32)
    weight = replace(quantise_fp8(torch.randn(6, 96, 272) / 16), dtype=torch.float64)
    scales = torch.rand(6, 96, 3) / 999
    grouped = replace(weight, scales=scales, group=128)
    bias = torch.randn(6, 96)
    for kept, named, own in ((weight, tokens, x[tokens]), (grouped, None, x[:36])):
        rows = elementwise.quantise_fp8(x if named is not None else own, kept.group)
        exact = (
            rows.numbers[: rows.count].double()
            * (rows.scales.T[: rows.count].repeat_interleave(kept.group, 1)[:, :272])
        )
        exact = exact if named is None else exact[named]
        got = module.grouped_fp8(rows, named, kept, bias, stops_of(COUNTS), gate)
        exact = expected(exact, COUNTS, kept.dequantised(), bias, gate)
        assert (got - exact).abs().max() <= 1e-5 * exact.abs().max()


def check_fp8_gates(module: ModuleType) -> None:
    """Check the same with gates."""
    check_fp8(module, OF_GPT_OSS)


@pytest.mark.parametrize(
    ("inner", "width", "gate"),
    [(1, 2, None), (32, 64, Gate("gelu")), (33, 66, Gate("gelu_tanh")), (80, 130, OF_GPT_OSS)],
)
@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_products_of_many_experts_are_each_ones_own(
    dtype: torch.dtype, inner: int, width: int, gate: Gate | None
) -> None:
    """Widths vary, with a gate and without."""
    check_products(grouped_gemm, dtype, inner, width, gate=gate)


def test_no_number_of_rows_has_more_tiles_than_are_launched() -> None:
    """However they fall to experts."""
    for experts in ([5], [1, 1, 1], [16, 1], [17, 33, 0, 1], [15, 15, 15]):
        tiles = sum(-(-rows // 16) for rows in experts)
        assert tiles <= grouped_gemm.num_tiles(sum(experts), len(experts), 16)


MISTAKES = {
    check_products: [
        Mutation("is_there = (rows < end)", "is_there = (rows < end - 1)"),
        Mutation("(columns < width)[None, :]", "(columns < width - 1)[None, :]"),
        Mutation("tl.minimum(columns, width - 1)", "tl.minimum(columns, width - 2)"),
        Mutation("tl.minimum(rows, end - 1)", "tl.minimum(rows, end - 2)"),
        Mutation(
            "own = expert.to(tl.int64) * width + column", "own = expert.to(tl.int64) + column"
        ),
        Mutation("stops + experts - 1", "stops + experts"),
        Mutation("tl.cumsum(tiles, 0) <= tile", "tl.cumsum(tiles, 0) < tile"),
        Mutation("(tile - first) * ROWS", "tile * ROWS"),
        Mutation(
            "expert == num_experts:\n        return\n    rows",
            "expert + 1 >= num_experts:\n        return\n    rows",
        ),
        Mutation("total += tl.load(bias + own)", "total += tl.load(bias + own * 0)"),
    ],
    check_uneven: [
        Mutation("inner % config", "0 * inner % config"),
        Mutation("is_place[None, :], other=0.0", "is_place[None, :], other=1.0"),
    ],
    check_gates: [
        Mutation("(width * inner).to(tl.int64)", "(inner * inner).to(tl.int64)"),
        Mutation("_biased(ups, bias, own + width)", "_biased(ups, bias, own)"),
        Mutation("width * 2 + column", "width + column"),
        Mutation(
            "gated(total, ups, CURVE, STEEPNESS, LIMIT, LIFT)\n    is_there", "total\n    is_there"
        ),
    ],
    check_order: [
        Mutation("min(num_tiles - first, TILES)", "TILES"),
        Mutation("at % several, at // several", "at % TILES, at // TILES"),
        Mutation("at // (TILES * num_blocks) * TILES", "at // (TILES * num_blocks)"),
    ],
    check_fp8: [
        Mutation("tl.load(x_scales + source)", "tl.load(x_scales + row)"),
        Mutation("tl.load(scales + own)", "tl.load(scales + own * 0)"),
        Mutation("at // group * padded_rows + source", "at // group + source"),
        Mutation("own * groups + at // group", "own * groups"),
        Mutation(
            "tl.dot(left, tl.trans(right)) * scale", "tl.dot(left, tl.trans(right)) * scale * 2"
        ),
    ],
    check_fp8_gates: [
        Mutation("of_column += width * groups", "of_column += width"),
        Mutation("tl.load(scales + own + width)", "tl.load(scales + own)"),
    ],
    check_few_bits: [
        Mutation("has_row = row < behind", "has_row = row < behind - 1"),
        Mutation("has_output = output < width", "has_output = output < width - 1"),
        Mutation("tl.load(tokens + source)", "tl.load(tokens + source * 0)"),
        Mutation("own += tl.minimum(output, width - 1)", "own += tl.minimum(output, width - 2)"),
        Mutation(
            "total += tl.load(bias + own).to(tl.float32)[:",
            "total += tl.load(bias).to(tl.float32)[:",
        ),
    ],
    check_few_bits_gates: [
        Mutation("own = own * 2", "own = own * 1"),
        Mutation("zeros, own + width, has_output", "zeros, own, has_output"),
        Mutation("ups += tl.load(bias + own + width)", "ups += tl.load(bias + own)"),
    ],
    check_wide: [
        Mutation("tl.minimum(row, behind - 1)", "tl.minimum(row, behind - 2)"),
        Mutation("IS_EVEN=inputs % BLOCK == 0", "IS_EVEN=True"),
        Mutation("zeros, own, 0, steps)", "zeros, own, 0, steps - 1)"),
    ],
}


@pytest.mark.long  # holds the tests above to what they can find
@pytest.mark.parametrize(("check", "mistake"), each_of(MISTAKES))
def test_a_mistake_is_found(
    check: Callable[[ModuleType], None], mistake: Mutation, tmp_path: Path
) -> None:
    """A bound that is off by one, or another's place."""
    assert_found(check, grouped_gemm, mistake, tmp_path)
