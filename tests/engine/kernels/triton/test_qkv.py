"""The kernels before attention on a GPU, compared with a float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.engine.kernels.triton.mutating import Mutation, assert_found, each_of
from tidemill.engine.kernels import elementwise as reference
from tidemill.engine.kernels.attention import AttentionShape, HeadNorms
from tidemill.engine.kernels.quantised import FP8, FP8_MAX
from tidemill.engine.kernels.triton import fp8_bits
from tidemill.engine.kernels.triton import qkv as qkv_kernels

PAGE_SIZE, PAGES = 4, 3
SHAPE = AttentionShape(9, 3, 12, 12, 1.0)
# The last of a page, the first of one, one amid a page that is not the next.
SLOTS = torch.tensor([3, 4, 10], dtype=torch.int32)


def pages_of(shape: AttentionShape, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return empty pages of keys and values."""
    heads = PAGES, shape.num_kv_heads, PAGE_SIZE
    keys, values = (
        torch.full((*heads, width), torch.nan).to(dtype)
        for width in (shape.key_dim, shape.value_dim)
    )
    return keys, values


def assert_stored(pages: Tensor, expected: Tensor) -> None:
    """Assert that slots contain the expected `[T, Hkv, D]`, and that others are unchanged."""
    wanted = torch.full(pages.shape, torch.nan, dtype=torch.float64)
    for slot, numbers in zip(SLOTS.tolist(), expected, strict=True):
        wanted[slot // PAGE_SIZE, :, slot % PAGE_SIZE] = numbers
    bound = 2e-3 if pages.dtype == torch.float16 else 1e-5
    torch.testing.assert_close(pages.double(), wanted, atol=bound, rtol=bound, equal_nan=True)


def check_entry(
    module: ModuleType,
    shape: AttentionShape = SHAPE,
    dtype: torch.dtype = torch.float32,
    turned: int = 5,
    *,
    is_normed: bool = True,
) -> None:
    """Compare queries, and the contents of pages, with the reference."""
    width = (shape.num_query_heads + 2 * shape.num_kv_heads) * shape.key_dim
    qkv = torch.randn(len(SLOTS), width).to(dtype)
    angles = torch.randn(len(SLOTS) + 1, turned)
    # Of one token more, whose cos_sin a mistake may read.
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)[:-1]
    weights = torch.randn(2, shape.key_dim)
    norms = HeadNorms(weights[0], weights[1], 1e-2) if is_normed else None
    exact = HeadNorms(*weights.double(), 1e-2) if is_normed else None
    query, key, value = reference.qk_norm_rope(qkv.double(), cos_sin.double(), shape, exact)
    keys, values = pages_of(shape, dtype)
    got = module.store_qkv(qkv, cos_sin, norms, shape, SLOTS, keys, values)
    # The reference cos_sin in fp32.
    bound = 2e-3 if dtype == torch.float16 else 1e-5
    torch.testing.assert_close(got.double(), query, atol=bound, rtol=bound)
    assert_stored(keys, key)
    assert_stored(values, value)


def check_store(module: ModuleType) -> None:
    """Compare pages with keys and values of unequal width, which are stored head after head."""
    shape = replace(SHAPE, num_kv_heads=9, key_dim=12, value_dim=7)
    key, value = torch.randn(9, 3, 12).transpose(0, 1), torch.randn(9, 3, 14)[..., ::2]
    keys, values = pages_of(shape)
    module.store_kv(key, value.transpose(0, 1), SLOTS, keys, values)
    assert_stored(keys, key)
    assert_stored(values, value.transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("is_normed", [True, False])
@pytest.mark.parametrize(("width", "turned"), [(12, 5), (16, 8), (12, 0), (1, 0)])
def test_heads_enter_as_the_reference_has_them(
    width: int, turned: int, dtype: torch.dtype, *, is_normed: bool
) -> None:
    """Turned in whole, in part, or not at all; normed or not; of any width."""
    shape = replace(SHAPE, key_dim=width, value_dim=width)
    check_entry(qkv_kernels, shape, dtype, turned, is_normed=is_normed)


@pytest.mark.parametrize("heads", [(1, 1), (8, 1), (16, 16), (10, 10)], ids=str)
def test_heads_may_fill_no_tile_or_more(heads: tuple[int, int]) -> None:
    """Any number of heads works."""
    check_entry(qkv_kernels, AttentionShape(*heads, 4, 4, 1.0), turned=2)


def test_keys_and_values_are_stored_as_they_are() -> None:
    """Networks that norm and rotate heads themselves use this."""
    check_store(qkv_kernels)


def check_eight_bits(module: ModuleType) -> None:
    """Compare every number, those halfway between two, those out of range, and NaN with torch."""
    own = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    halves = (own[:126] + own[1:127]) / 2
    near = torch.cat([halves, halves.nextafter(torch.tensor(0.0)), torch.randn(200), own])
    numbers = torch.cat([near, torch.tensor([448.1, 512.0, -1e9, torch.inf, 1e-9, -0.0])])
    count = len(numbers)
    shape = AttentionShape(1, 1, count, count, 1.0)
    slots = torch.zeros(1, dtype=torch.int32)
    wanted = numbers.clamp(-FP8_MAX, FP8_MAX).to(FP8)

    def pages() -> tuple[Tensor, Tensor]:
        keys, values = (torch.zeros(1, 1, 1, count, dtype=torch.uint8).view(FP8) for _ in range(2))
        return keys, values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qkv_kernels, "as_e4m3", module.as_e4m3)
        stored, entered = pages(), pages()
        qkv_kernels.store_kv(numbers.view(1, 1, -1), numbers.view(1, 1, -1), slots, *stored)
        qkv_kernels.store_qkv(numbers.repeat(1, 3), torch.empty(1, 0), None, shape, slots, *entered)
    for got in (*stored, *entered):
        assert torch.equal(got.view(-1).view(torch.uint8), wanted.view(torch.uint8))


def test_eight_bits_are_the_nearest() -> None:
    """Keys and values agree, however they are stored."""
    check_eight_bits(fp8_bits)


MISTAKES = {
    check_entry: [
        Mutation("is_head = heads < query_heads", "is_head = heads < query_heads - 1"),
        Mutation("is_there = columns < WIDTH", "is_there = columns < WIDTH - 1"),
        Mutation("numbers, 1) / WIDTH", "numbers, 1) / BLOCK"),
        Mutation("columns < 2 * TURNED", "columns < 2 * TURNED - 1"),
        Mutation("is_turned = columns < TURNED", "is_turned = columns <= TURNED"),
        Mutation("-others, others", "others, others"),
        Mutation("heads - key_tiles * HEADS)", "heads)"),
        Mutation("slot % PAGE_SIZE", "slot % (PAGE_SIZE - 1)"),
        Mutation("(page * key_heads + heads)", "(page + heads)"),
        Mutation("token * 2 * TURNED", "token * TURNED"),
        Mutation("source + key_heads * WIDTH", "source"),
    ],
    check_store: [
        Mutation("is_head = heads < heads_there", "is_head = heads < heads_there - 1"),
        Mutation("(tile // 2) * HEADS", "(tile // 2) * (HEADS + 1)"),
        Mutation("heads * key_head_stride", "heads * value_head_stride"),
        Mutation(
            "is_head & (columns < WIDTH), other=0.0", "is_head & (columns < WIDTH - 1), other=0.0"
        ),
    ],
    check_eight_bits: [
        Mutation("0x7FFFF + ((bits", "0x80000 + ((bits"),
        Mutation("tl.where(is_nan, 0x7F, code)", "code"),
        Mutation("size > LARGEST, LARGEST, size", "size > 600.0, LARGEST, size"),
        Mutation("size < LOWEST_NORMAL, subnormal", "size <= LOWEST_NORMAL / 2, subnormal"),
        Mutation(">> 24) & 0x80", ">> 24) & 0"),
    ],
}  # fmt: skip


@pytest.mark.long  # holds the tests above to what they can find
@pytest.mark.parametrize(("check", "mistake"), each_of(MISTAKES))
def test_a_mistake_is_found(
    check: Callable[[ModuleType], None], mistake: Mutation, tmp_path: Path
) -> None:
    """A bound that is off by one, or a stride or a bit that is another's."""
    assert_found(check, fp8_bits if check is check_eight_bits else qkv_kernels, mistake, tmp_path)
