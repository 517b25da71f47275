"""The GPU's norms and gates, each against its reference in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.engine.kernels.triton.mutating import Mutation, assert_found, each_of
from tidemill.engine.kernels import elementwise as reference
from tidemill.engine.kernels.elementwise import Gate
from tidemill.engine.kernels.quantised import FP8_MAX, Fp8Rows, quantise_rows_fp8
from tidemill.engine.kernels.triton import elementwise, fp8_bits

WIDTHS = [1, 15, 16, 17, 96]
BOUND = {torch.float32: 1e-5, torch.float16: 2e-3}
GATES = [
    Gate(),
    Gate("gelu"),
    Gate("gelu_tanh"),
    Gate(alpha=1.702, limit=0.7, beta=1.0),
]


def assert_near(got: Tensor, expected: Tensor) -> None:
    """Compare a kernel's numbers with exact ones, up to one rounding to its dtype."""
    bound = BOUND[got.dtype]
    torch.testing.assert_close(got.double(), expected, atol=bound, rtol=bound)


def check_norms(module: ModuleType, dtype: torch.dtype = torch.float32) -> None:
    """Compare each norm with torch's, for rows that end within a block and at its end."""
    for width in WIDTHS:
        x = torch.randn(3, width).to(dtype)
        weight, bias = torch.randn(width), torch.randn(width).to(dtype)
        exact = [numbers.double() for numbers in (x, weight, bias)]
        assert_near(module.rms_norm(x, weight, 1e-2), reference.rms_norm(*exact[:2], 1e-2))
        normed = module.layer_norm(x, weight, bias, 1e-2)
        assert_near(normed, reference.layer_norm(*exact, 1e-2))


def check_sums(module: ModuleType, dtype: torch.dtype = torch.float32) -> None:
    """Compare each norm of a sum with the norm of the updated residual."""
    for width in WIDTHS:
        x, residual = torch.randn(2, 3, width).to(dtype)
        weight, bias = torch.randn(2, width).to(dtype)
        added = residual + x
        for add, norm in (
            (partial(module.add_rms_norm, weight=weight), module.rms_norm),
            (partial(module.add_layer_norm, weight=weight, bias=bias), module.layer_norm),
        ):
            own = residual.clone()
            got = add(x, own, eps=1e-2)
            assert torch.equal(own, added)
            biases = (bias,) if norm is module.layer_norm else ()
            assert torch.equal(got, norm(added, weight, *biases, 1e-2))


def check_gates(module: ModuleType, dtype: torch.dtype = torch.float32) -> None:
    """Compare each gate with torch's, for columns that fill no block, one, and more."""
    for width in (1, 17, 1024, 1100):
        both = (2 * torch.randn(2, 2 * width)).to(dtype)
        for gate in GATES:
            expected = reference.act_and_mul(both.double(), gate)
            assert_near(module.act_and_mul(both, gate), expected)


def assert_quantised(got: Fp8Rows, x: Tensor, group: int) -> None:
    """Compare numbers and scales with the reference's for x, bit by bit."""
    numbers, scales = quantise_rows_fp8(x, group)
    assert got.count == len(x)
    assert got.dtype == x.dtype
    assert torch.equal(got.numbers[: got.count].float(), numbers.float())
    assert torch.equal(got.scales.T[: got.count], scales)


def check_to_fp8(module: ModuleType) -> None:
    """Compare rows and groups with the reference, from tiny rows to large ones."""
    x = torch.randn(6, 2500) * torch.tensor([0.1, 1e4, 1e-3, 0.0, 1e-20, 3.0])[:, None]
    x[5, 100:] *= 1e-4  # most of it subnormal
    x[0, :5] = torch.tensor([FP8_MAX, 17.0, 19.0, -21.0, 3 * 2**-10])  # halfway
    for width, group in ((2500, 2500), (2048, 2048), (300, 128), (1300, 256), (2500, 2048)):
        assert_quantised(module.quantise_fp8(x[:, :width], group), x[:, :width], group)


def check_fused_fp8(module: ModuleType, dtype: torch.dtype = torch.float32) -> None:
    """Compare fused quantisation of norms and gates with the reference in two steps."""
    for width, group in ((17, 17), (300, 128), (512, 256)):
        x, residual = torch.randn(2, 5, width).to(dtype)
        weights = torch.randn(width)
        own = residual.clone()
        first = module.add_rms_norm_fp8(None, residual, weights, 1e-2, group)
        assert_quantised(first, elementwise.rms_norm(own, weights, 1e-2), group)
        later = module.add_rms_norm_fp8(x, residual, weights, 1e-2, group)
        assert_quantised(later, elementwise.add_rms_norm(x, own, weights, 1e-2), group)
        assert torch.equal(residual, own)
    for width, group in ((1100, 1100), (1100, 128), (40, 40)):
        both = torch.randn(3, 2 * width).to(dtype)
        gated = module.act_and_mul_fp8(both, Gate(beta=1.0), group)
        assert_quantised(gated, elementwise.act_and_mul(both, Gate(beta=1.0)), group)


def check_store_fp8(module: ModuleType) -> None:
    """Compare groups that end within a block with the reference."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elementwise, "store_fp8", module.store_fp8)
        x = torch.randn(3, 1300)
        assert_quantised(elementwise.quantise_fp8(x, 128), x, 128)


@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_a_norm_is_torchs(dtype: torch.dtype) -> None:
    """Whatever the width, whatever the dtypes of weights."""
    check_norms(elementwise, dtype)


@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_a_norm_of_a_sum_leaves_the_sum(dtype: torch.dtype) -> None:
    """Rounded, as it is normed."""
    check_sums(elementwise, dtype)


@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_a_gate_is_torchs(dtype: torch.dtype) -> None:
    """Each activation is tested with limits and without."""
    check_gates(elementwise, dtype)


def test_rows_become_fp8_as_torch_rounds_them() -> None:
    """Scales are per row or per group."""
    check_to_fp8(elementwise)


@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_fused_quantisation_matches_two_passes(dtype: torch.dtype) -> None:
    """Scales are per row or per group, and the residual is updated."""
    check_fused_fp8(elementwise, dtype)


def test_a_row_too_wide_for_a_program_is_quantised_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate is computed first."""
    monkeypatch.setattr(elementwise, "MAX_GATED_ROW", 16)
    both = torch.randn(2, 40)
    quantised = elementwise.act_and_mul_fp8(both, Gate(), 20)
    assert_quantised(quantised, elementwise.act_and_mul(both, Gate()), 20)


@pytest.mark.parametrize("group", [256, 128])
def test_rows_with_nan_have_nan_results(group: int) -> None:
    """The sampler must detect them; other rows are unchanged."""
    x = torch.randn(2, 256)
    x[0, 200] = torch.nan
    quantised = elementwise.quantise_fp8(x, group)
    assert torch.equal(quantised.numbers[:2].float().isnan(), x.isnan())


def test_gemmas_weight_is_widened_before_one_is_added() -> None:
    """A small weight would be lost in a narrow sum."""
    stored = torch.tensor([2**-10], dtype=torch.bfloat16)
    assert elementwise.norm_weight(stored, 1.0).item() == 1 + 2**-10


def test_rows_may_have_a_stride_or_more_dimensions() -> None:
    """A part of a wider tensor, and one of transformers' shapes."""
    wide, weight = torch.randn(2, 3, 40), torch.randn(20)
    expected = reference.rms_norm(wide[..., :20], weight, 1e-5)
    torch.testing.assert_close(elementwise.rms_norm(wide[..., :20], weight, 1e-5), expected)
    torch.testing.assert_close(elementwise.rms_norm(wide[0, :, :20], weight, 1e-5), expected[0])
    joined = reference.act_and_mul(wide, Gate())
    torch.testing.assert_close(elementwise.act_and_mul(wide, Gate()), joined)


def test_of_no_rows_nothing_comes() -> None:
    """Steps may have none."""
    x, weight = torch.randn(0, 16), torch.randn(16)
    assert elementwise.rms_norm(x, weight, 1e-5).shape == (0, 16)
    assert elementwise.act_and_mul(x, Gate()).shape == (0, 8)
    assert elementwise.add_rms_norm_fp8(None, x, weight, 1e-5, 16).count == 0
    assert elementwise.act_and_mul_fp8(torch.randn(0, 512), Gate(), 128).count == 0


def test_nan_stays_nan() -> None:
    """A limit does not hide it, either."""
    both = torch.tensor([[torch.nan, 1.0, 1.0, torch.nan]])
    assert elementwise.act_and_mul(both, Gate(limit=1.0)).isnan().all()


MISTAKES = {
    check_norms: [
        Mutation(
            "is_there = columns < width\n    numbers", "is_there = columns < width - 1\n    numbers"
        ),
        Mutation("tl.sum(numbers * numbers, 0) / width", "tl.sum(numbers * numbers, 0) / BLOCK"),
        Mutation("tl.sum(numbers, 0) / width, 0.0)", "tl.sum(numbers, 0) / width, 1.0)"),
        Mutation(
            "tl.int64) * width\n    columns = tl.arange", "tl.int64)\n    columns = tl.arange"
        ),
    ],
    check_sums: [Mutation("numbers = added.to", "numbers = 1 + added.to")],
    check_gates: [
        Mutation(
            "is_there = columns < width\n    gate", "is_there = columns < width - 1\n    gate"
        ),
        Mutation("tl.program_id(1) * BLOCK", "tl.program_id(1) * (BLOCK + 1)"),
        Mutation("both + 2 * row + width", "both + 2 * row + width - 1"),
        Mutation("up < -LIMIT", "up < LIMIT"),
    ],
    check_to_fp8: [
        Mutation(
            "other=0.0).to(tl.float32)\n        largest",
            "other=9e9).to(tl.float32)\n        largest",
        ),
        Mutation("tl.program_id(1) * BLOCK\n    column", "tl.program_id(1) * GROUP\n    column"),
    ],
    check_fused_fp8: [
        Mutation("index, 0, width", "0, 0, width"),
        Mutation("index, start, width", "index, 0, width"),
        Mutation("(residual, None) if x is None", "(residual, residual) if x is None"),
        Mutation("joined = joined.to(tl.float32)", "joined = 2 * joined.to(tl.float32)"),
    ],
    check_store_fp8: [
        Mutation("code, column < width", "code, column < width - 1"),
        Mutation("group * GROUP < width", "group * GROUP < width - GROUP"),
        Mutation("* padded_rows + row", "* padded_rows"),
        Mutation("tl.max(tl.abs(grouped), 1)", "tl.max(grouped, 1)"),
    ],
}


@pytest.mark.long  # holds the tests above to what they can find
@pytest.mark.parametrize(("check", "mistake"), each_of(MISTAKES))
def test_a_mistake_is_found(
    check: Callable[[ModuleType], None], mistake: Mutation, tmp_path: Path
) -> None:
    """A bound that is off, or a mean over a block."""
    module = fp8_bits if check is check_store_fp8 else elementwise
    assert_found(check, module, mistake, tmp_path)
