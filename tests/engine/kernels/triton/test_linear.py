"""The GPU's products with quantised weights, each against its reference in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from tests.engine.kernels.triton.mutating import Mutation, assert_found
from tidemill.engine.kernels import elementwise
from tidemill.engine.kernels.linear import Fp8Linear, LinearFactory
from tidemill.engine.kernels.quantised import (
    BLOCK,
    FP8,
    FP8_MAX,
    Quantised,
    pack_int4,
    quantise_rows_fp8,
)
from tidemill.engine.kernels.triton import elementwise as triton_ops
from tidemill.engine.kernels.triton import fp8, fp8_bits, linear, split_k

BOUND = {torch.float32: 1e-5, torch.float16: 4e-3}
# Outputs, inputs and the size of a group: ends within tiles and at them, groups within a block,
# larger ones of inputs that programs share, a whole row.
SHAPES = [(66, 136, 32), (3, 560, 256), (17, 40, 40)]


def of_four_bits(outputs: int, inputs: int, group: int, dtype: torch.dtype) -> Quantised:
    """Return a weight of random numbers of four bits."""
    groups = -(-inputs // group)
    numbers = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    zeros = torch.randint(0, 16, (outputs, groups), dtype=torch.uint8)
    scales = torch.rand(outputs, groups) + 0.5
    return Quantised(pack_int4(numbers), scales, zeros, inputs, group, dtype)


def of_eight_bits(outputs: int, inputs: int, group: int, dtype: torch.dtype) -> Quantised:
    """Return a weight of random fp8 numbers, among them the smallest and the largest."""
    numbers = torch.randn(outputs, inputs)
    numbers[:, :4] = torch.tensor([0.0, 2**-9, -FP8_MAX, 2**-6])
    scales = torch.rand(outputs, -(-inputs // group)) * 0.01 + 0.01
    return Quantised(numbers.to(FP8), scales, None, inputs, group, dtype)


def of_fp4(outputs: int, inputs: int, _: int, dtype: torch.dtype) -> Quantised:
    """Return a weight of random e2m1 numbers, scaled by powers of two in groups of 32."""
    numbers = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    scales = torch.randint(124, 130, (outputs, -(-inputs // 32)), dtype=torch.uint8)
    return Quantised(pack_int4(numbers), scales, None, inputs, 32, dtype)


def of_nvfp4(outputs: int, inputs: int, _: int, dtype: torch.dtype) -> Quantised:
    """Return a weight of random e2m1 numbers, scaled by fp8 in groups of 16 and by fp32 in rows."""
    numbers = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    scales = (torch.rand(outputs, -(-inputs // 16)) * 4).to(FP8)
    rows = torch.rand(outputs, 1) + 0.5
    return Quantised(pack_int4(numbers), scales, None, inputs, 16, dtype, row_scales=rows)


Makes = Callable[[int, int, int, torch.dtype], Quantised]
WEIGHTS: list[tuple[Makes, tuple[int, int, int]]] = [
    *((make, shape) for shape in SHAPES for make in (of_four_bits, of_eight_bits)),
    (of_fp4, SHAPES[0]),
    (of_nvfp4, SHAPES[0]),
]


def exactly(weight: Quantised) -> Tensor:
    """Return a dequantised weight in float64."""
    return replace(weight, dtype=torch.float64).dequantised()


def assert_near(got: Tensor, expected: Tensor) -> None:
    """Compare a kernel's numbers with exact ones, relative to the largest."""
    bound = BOUND[got.dtype] * float(expected.abs().max())
    torch.testing.assert_close(got.double(), expected, atol=bound, rtol=0.0)


def check_multiply(module: ModuleType, dtype: torch.dtype = torch.float32) -> None:
    """Compare products of few rows with those of the dequantised weight, with and without bias."""
    for rows, (make, shape) in zip([17, 1, 2, 16, 33, 2, 17, 33], WEIGHTS, strict=True):
        weight, bias = make(*shape, dtype), torch.randn(shape[0]).to(dtype)
        x = torch.randn(rows, shape[1]).to(dtype)
        expected = functional.linear(x.double(), exactly(weight))
        if rows % 2:
            assert_near(module.multiply(x, weight, None), expected)
        else:
            assert_near(module.multiply(x, weight, bias), expected + bias.double())


def check_multiply_wide(module: ModuleType, dtype: torch.dtype = torch.float32) -> None:
    """Compare products of many rows with those of the rounded weight, over several tiles."""
    cases = (
        (of_four_bits, (66, 136, 32)),
        (of_eight_bits, (66, 136, 64)),
        (of_four_bits, (3, 560, 256)),
        (of_fp4, (3, 136, 32)),
    )
    for rows, (make, shape) in zip((130, 65, 65, 65), cases, strict=True):
        weight, bias = make(*shape, dtype), torch.randn(shape[0]).to(dtype)
        x = torch.randn(rows, shape[1]).to(dtype)
        expected = functional.linear(x.double(), weight.dequantised().double())
        assert_near(module.multiply(x, weight, None), expected)
        assert_near(module.multiply(x, weight, bias), expected + bias.double())


def check_dequantised(module: ModuleType) -> None:
    """Compare every number with the reference's, rounded once."""
    for make, shape in WEIGHTS:
        for dtype in (torch.float32, torch.float16):
            weight = make(*shape, dtype)
            assert torch.equal(module.dequantised(weight), weight.dequantised())


def check_join(module: ModuleType) -> None:
    """Compare joined shares with the sum of all, with and without bias."""
    parts, bias = torch.randn(3, 5, 300), torch.randn(300)
    for given, expected in ((None, parts.sum(0)), (bias, parts.sum(0) + bias)):
        assert_near(module.join(parts, given, torch.empty(5, 300)), expected.double())


def check_halves(module: ModuleType) -> None:
    """Compare every eight-bit number except NaN with torch's."""
    bits = torch.arange(256, dtype=torch.uint8)
    numbers = bits[bits & 127 != 127].view(2, -1).view(FP8)
    weight = Quantised(numbers, torch.ones(2, 1), None, 127, 127, torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "halves_of_e4m3", module.halves_of_e4m3)
        assert torch.equal(linear.dequantised(weight), numbers.float())


def check_fp4(module: ModuleType) -> None:
    """Check every number of e2m1, with the smallest scale and the largest."""
    numbers = torch.arange(16, dtype=torch.uint8).expand(2, 16)
    scales = torch.tensor([[1], [144]], dtype=torch.uint8)
    weight = Quantised(pack_int4(numbers), scales, None, 16, 16, torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("halves_of_e2m1", "scales_for_halves"):
            patch.setattr(linear, name, getattr(module, name))
        got = linear.dequantised(weight)
    sizes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    exact = torch.tensor([*sizes, *(-size for size in sizes)])
    assert torch.equal(got, torch.stack((exact * 2.0**-126, exact * 2.0**17)))
    assert torch.equal(got, weight.dequantised())


def check_fp8_scales(module: ModuleType) -> None:
    """Check every fp8 scale, times one that is not a power of two."""
    scales = torch.arange(127, dtype=torch.uint8).view(FP8)[None]
    numbers = torch.randint(0, 16, (1, 127 * 16), dtype=torch.uint8)
    weight = Quantised(
        *(pack_int4(numbers), scales, None, 127 * 16, 16, torch.float32),
        row_scales=torch.tensor([[0.3]]),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "scales_for_halves", module.scales_for_halves)
        assert torch.equal(linear.dequantised(weight), weight.dequantised())


def with_blocks(weight: Quantised) -> Quantised:
    """Return a weight whose scales are those of blocks of 128 outputs."""
    first = weight.scales[::BLOCK].repeat_interleave(BLOCK, 0)
    return replace(weight, scales=first[: len(weight.scales)].contiguous())


def check_multiply_fp8(module: ModuleType) -> None:
    """Compare products of fp8 rows with float64: by rows, groups and blocks."""
    for rows, shape in ((3, (17, 40, 40)), (17, (66, 600, 128)), (2, (5, 384, 256))):
        weight = of_eight_bits(*shape, torch.float32)
        x, bias = torch.randn(rows, shape[1]), torch.randn(shape[0])
        expected = fp8_product(x, weight)
        quantised = triton_ops.quantise_fp8(x, shape[2])
        prepared = module.prepare(weight)
        assert_near(module.multiply(quantised, prepared, None), expected)
        assert_near(module.multiply(quantised, prepared, bias), expected + bias)
    weight, x = with_blocks(of_eight_bits(130, 256, 128, torch.float32)), torch.randn(40, 256)
    assert module.prepare(of_eight_bits(130, 256, 128, torch.float32)).scaling == "group"
    assert module.prepare(weight).scaling == "block"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TILES_OF_ROWS", tl.constexpr(2))
        patch.setattr(module, "PROGRAMS", {16: 1})
        quantised = triton_ops.quantise_fp8(x, 128)
        got = module.multiply(quantised, module.prepare(weight), None)
    assert_near(got, fp8_product(x, weight))


def fp8_product(x: Tensor, weight: Quantised) -> Tensor:
    """Return x as fp8 times a weight in float64."""
    numbers, scales = quantise_rows_fp8(x, weight.group)
    spread = scales.repeat_interleave(weight.group, 1)[:, : weight.inputs]
    return (numbers.double() * spread) @ exactly(weight).T


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_few_rows_are_multiplied_by_few_bits(dtype: torch.dtype) -> None:
    """Weights have four or eight bits, with any group size."""
    check_multiply(linear, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_many_rows_are_multiplied_by_few_bits(dtype: torch.dtype) -> None:
    """Weights have four or eight bits, with any group size."""
    check_multiply_wide(linear, dtype)


def test_a_weight_is_dequantised() -> None:
    """Weights have four or eight bits."""
    check_dequantised(linear)


def test_every_fp8_scale_is_read() -> None:
    """Scales of NVFP4 are multiples of another."""
    check_fp8_scales(fp8_bits)


def test_rows_of_fp8_are_multiplied_by_fp8() -> None:
    """Scales are per row or per group."""
    check_multiply_fp8(fp8)


MISTAKES: list[tuple[ModuleType, Callable[[ModuleType], None], Mutation]] = [
    (linear, check_multiply, Mutation("row < rows,", "row < rows - 1,")),
    (
        linear,
        check_multiply,
        Mutation(
            "has_row[None, :] & (column < inputs)", "has_row[None, :] & (column < inputs - 1)"
        ),
    ),
    (
        linear,
        check_multiply,
        Mutation("min(first + steps_each, tl", "min(first + steps_each - 1, tl"),
    ),
    (split_k, check_join, Mutation("place < count", "place < count - 1")),
    (split_k, check_join, Mutation("in range(shares)", "in range(shares - 1)")),
    (split_k, check_join, Mutation("place % outputs", "place % (outputs - 1)")),
    (linear, check_multiply, Mutation("1), max(BLOCK //", "1), max(64 //")),
    (
        linear,
        check_multiply,
        Mutation("(words >> (4 * place)) & 15", "(words >> (4 * place)) & 7"),
    ),
    (linear, check_multiply_wide, Mutation("minimum(row, rows - 1)", "minimum(row, rows - 2)")),
    (linear, check_multiply_wide, Mutation("(output, outputs - 1)", "(output, outputs - 2)")),
    (linear, check_multiply_wide, Mutation("- step * STEP - part", "- 1 - step * STEP - part")),
    (linear, check_multiply_wide, Mutation("group + part * GROUPS //", "group + 0 * GROUPS //")),
    (
        linear,
        check_multiply_wide,
        Mutation("inputs + first * STEP + column[:", "inputs + column[:"),
    ),
    (linear, check_multiply_wide, Mutation("part * 4 * PART // WORDS", "part * 4")),
    (linear, check_multiply_wide, Mutation("held_at += WORDS", "held_at += 1")),
    (linear, check_multiply_wide, Mutation("weight_at += PART", "weight_at += 1")),
    (fp8_bits, check_halves, Mutation("(bits & 0x80) << 8", "(bits & 0) << 8")),
    (fp8_bits, check_halves, Mutation("(bits & 0x7F) << 7", "(bits & 0x3F) << 7")),
    (fp8_bits, check_fp4, Mutation("(bits & 8) << 12", "(bits & 0) << 12")),
    (fp8_bits, check_fp4, Mutation("(bits & 7) << 9", "(bits & 3) << 9")),
    (fp8_bits, check_fp4, Mutation("(tl.int32) + OF_FP4_HALVES", "(tl.int32) + 13")),
    (fp8_bits, check_fp8_scales, Mutation("256.0 * 2**14", "128.0 * 2**14")),
    (linear, check_multiply, Mutation("tl.load(numbers + places, is", "tl.load(numbers, is")),
    (linear, check_multiply_wide, Mutation("halves_of_e2m1(bits).to(tl.f", "bits.to(tl.f")),
    (
        linear,
        check_dequantised,
        Mutation(
            "has_output[:, None] & (column < inputs)[None, :]\n    tl.store",
            "has_output[:, None] & (column < inputs - 1)[None, :]\n    tl.store",
        ),
    ),
    (fp8, check_multiply_fp8, Mutation("range(first, min(first", "range(first + 1, min(first")),
    (fp8, check_multiply_fp8, Mutation("inputs - (step - first) * STEP", "inputs - step * STEP")),
    (fp8, check_multiply_fp8, Mutation("bias if shares == 1 else None", "bias")),
    (fp8, check_multiply_fp8, Mutation("minimum(row, rows - 1)", "minimum(row, rows - 2)")),
    (fp8, check_multiply_fp8, Mutation("(output < outputs)", "(output < outputs - 1)")),
    (fp8, check_multiply_fp8, Mutation("column < inputs -", "column < inputs - 1 -")),
    (fp8, check_multiply_fp8, Mutation("step // steps_a_group", "step")),
    (fp8, check_multiply_fp8, Mutation("// STEP * groups + group", "// STEP * groups")),
    (fp8, check_multiply_fp8, Mutation("place % height, place // height", "place % height, 0")),
    (fp8, check_multiply_fp8, Mutation("minimum(row_tiles - band", "minimum(row_tiles - 0 * band")),
    (fp8, check_multiply_fp8, Mutation("first.is_meta or torch.equal", "True or torch.equal")),
]


@pytest.mark.long  # holds the tests above to what they can find
@pytest.mark.parametrize(
    ("module", "check", "mistake"), MISTAKES, ids=[mistake.wrong for _, _, mistake in MISTAKES]
)
def test_a_mistake_is_found(
    module: ModuleType, check: Callable[[ModuleType], None], mistake: Mutation, tmp_path: Path
) -> None:
    """A bound that is off by one, a bit that is another's."""
    assert_found(check, module, mistake, tmp_path)


def test_every_path_agrees_with_the_dequantised_weight() -> None:
    """Paths are fp8 rows, quantised weights, and dequantisation; inputs may be sorted."""
    torch.manual_seed(0)  # others are as much as 5.01 % apart in fp8
    ways = [linear.prepare_scaled, linear.prepare_fp8, linear.prepare]
    makes = LinearFactory(elementwise, [], quantised=ways)
    for make, shape in ((of_eight_bits, (32, 64, 64)), (of_four_bits, (20, 64, 32))):
        weight = make(*shape, torch.float16)
        if make is of_four_bits:
            weight = replace(weight, order=torch.randperm(64))
        bias = torch.randn(shape[0]).half()
        product = makes.make(weight, bias)
        is_prepared = isinstance(product, Fp8Linear) or product.__module__ == linear.__name__
        assert is_prepared
        for rows in (2, 65, linear.most_rows(weight) + 1)[: 3 if make is of_four_bits else 2]:
            x = torch.randn(rows, 64).half()
            expected = functional.linear(x.double(), exactly(weight), bias.double())
            apart = torch.linalg.vector_norm(product(x) - expected)
            assert apart <= 0.05 * torch.linalg.vector_norm(expected)


@pytest.mark.parametrize(("group", "most"), [(16, 64), (32, 1024), (256, 1024)])
def test_groups_too_small_for_a_wide_tile_are_dequantised_sooner(group: int, most: int) -> None:
    """One product there has one scale of each output."""
    assert linear.most_rows(of_four_bits(4, 256, group, torch.float16)) == most


def test_a_way_that_gives_something_else_is_not_used() -> None:
    """The weight is dequantised for each product then."""
    weight = of_four_bits(4, 32, 32, torch.float32)
    makes = LinearFactory(
        elementwise, [], quantised=[lambda _, __: lambda x: x.new_zeros(len(x), 4)]
    )
    x = torch.randn(2, 32)
    assert torch.equal(makes.make(weight)(x), functional.linear(x, weight.dequantised()))
    assert makes.needs_torch
