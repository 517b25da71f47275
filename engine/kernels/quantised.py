"""Quantised weights: their layout, packing and dequantisation; quantisation to fp8 and int8.

There are three forms, whatever the checkpoint's format (GPTQ, AWQ, …): fp8 (e4m3) numbers, int4
with zero points, and fp4 (e2m1) with scales that are powers of two (e8m0), as in mxfp4, or fp8, as
in NVFP4. In all of them groups of a row's numbers share a scale. int8 is made only at load, with a
scale per row, from weights with rotated inputs: in real models a few inputs are many times as large
as the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import lcm, sqrt

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
INT8_MAX = 127.0
# A block of this many inputs is packed to 16 words; each word has the 4-bit numbers of eight inputs
# that are 16 apart, so that one shift gives a kernel neighbouring inputs of neighbouring words.
BLOCK, WORDS_A_BLOCK = 128, 16
ROWS_AT_ONCE = 4096
# Inputs that int8 rotates together.
ROTATED = 64
# Numbers of e2m1 by their codes, the sign being the highest bit.
FP4_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_NUMBERS = (*FP4_SIZES, *(-size for size in FP4_SIZES))
# Bits of fp32 after its exponent, which has e8m0's bias.
EXPONENT_SHIFT = 23


@dataclass(frozen=True, slots=True)
class Quantised:
    """Quantised weight `[…, O, I]`: (number − zero) · scale, with one pair per `group` of inputs.

    `numbers` are fp8 or int8 `[…, O, I]`, or int4 or fp4 in int32 words `[…, O, ⌈I / 128⌉ · 16]`:
    word w of a block has the numbers of its inputs w, w + 16, …, w + 112, the lowest bits first;
    int16 numbers are only dequantised. Only int4 has zeros. Scales in fp8 (NVFP4) are multiples of
    `row_scales`. With an `order` (GPTQ act-order) column i is for input `order[i]`. Numbers are of
    the weight after `rotation` of `rotated` inputs, so a product's inputs must be rotated, too.
    Products are in `dtype`.
    """

    numbers: Tensor
    scales: Tensor  # […, O, ⌈I / group⌉], fp32; of fp4 e8m0 in uint8, or fp8
    zeros: Tensor | None  # […, O, ⌈I / group⌉], uint8
    inputs: int
    group: int
    dtype: torch.dtype
    order: Tensor | None = None  # [I]
    rotation: int = 1
    row_scales: Tensor | None = None  # […, O, 1], fp32

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the dequantised weight."""
        return torch.Size((*self.numbers.shape[:-1], self.inputs))

    @property
    def device(self) -> torch.device:
        """Return the device of its numbers."""
        return self.numbers.device

    @property
    def is_fp8(self) -> bool:
        """Return whether its numbers are fp8."""
        return self.numbers.dtype == FP8

    @property
    def is_packed(self) -> bool:
        """Return whether its numbers are four bits in words."""
        return self.numbers.dtype == torch.int32

    @property
    def kind(self) -> tuple[torch.dtype, torch.dtype, int, torch.dtype, bool]:
        """Return the properties that select a kernel for it, besides its shape."""
        number, scale = self.numbers.dtype, self.scales.dtype
        return number, scale, self.group, self.dtype, self.order is None

    @property
    def nbytes(self) -> int:
        """Return its size in bytes."""
        tensors = (self.numbers, self.scales, self.zeros, self.order, self.row_scales)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def dequantised(self) -> Tensor:
        """Dequantise to `[…, O, I]`, computed in fp32 and rounded once."""
        scales = self.scales
        if not self.is_packed:
            numbers = self.numbers.float()
        elif self.zeros is None:
            codes = unpack_int4(self.numbers, self.inputs)
            numbers = torch.tensor(FP4_NUMBERS, device=self.device)[codes.int()]
            if self.row_scales is None:
                scales = (scales.int() << EXPONENT_SHIFT).view(torch.float32)
            else:
                scales = scales.float() * self.row_scales
        else:
            numbers = unpack_int4(self.numbers, self.inputs).float() - self._expand_groups(
                self.zeros
            )
        weight = numbers * self._expand_groups(scales)
        weight = rotated(weight, self.rotation).to(self.dtype)
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(-1, self.order, weight)

    def rows(self, indices: Tensor) -> Tensor:
        """Dequantise some rows `[T, I]` of a weight `[O, I]` to fp32."""

        def take(tensor: Tensor) -> Tensor:
            return bytes_of(tensor)[indices].view(tensor.dtype)

        return replace(self._mapped(take), dtype=torch.float32).dequantised()

    def first(self, count: int) -> Quantised:
        """Return the first of stacked matrices `[E, O, I]`."""
        return self._mapped(lambda tensor: tensor[:count])

    def submatrix(self, rows: range, columns: range) -> Quantised | None:
        """Return contiguous rows and columns; None if that would split a group or a block."""
        is_one = self.group >= self.inputs
        step = lcm(1 if is_one else self.group, BLOCK if self.is_packed else 1)
        begin, end = columns.start, columns.stop
        is_cut = begin % step or (end % step and end < self.inputs)
        if len(columns) < self.inputs and (is_cut or self.order is not None):
            return None
        of_group = slice(None) if is_one else slice(begin // self.group, -(-end // self.group))
        words = slice(begin, end)
        if self.is_packed:
            words = slice(begin // BLOCK * WORDS_A_BLOCK, -(-end // BLOCK) * WORDS_A_BLOCK)
        own = slice(rows.start, rows.stop)
        return replace(
            self,
            numbers=self.numbers[own, words].contiguous(),
            scales=self.scales[own, of_group].contiguous(),
            zeros=None if self.zeros is None else self.zeros[own, of_group].contiguous(),
            row_scales=None if self.row_scales is None else self.row_scales[own].contiguous(),
            inputs=len(columns),
            group=len(columns) if is_one else self.group,
        )

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Quantised:
        """Return it with its tensors of rows changed."""
        zeros, row_scales = (
            None if tensor is None else change(tensor) for tensor in (self.zeros, self.row_scales)
        )
        numbers, scales = change(self.numbers), change(self.scales)
        return replace(self, numbers=numbers, scales=scales, zeros=zeros, row_scales=row_scales)

    def _expand_groups(self, of_groups: Tensor) -> Tensor:
        """Repeat each group's number for all its inputs."""
        return of_groups.float().repeat_interleave(self.group, -1)[..., : self.inputs]


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Activations `[T, I]` quantised to fp8: number · scale, with one scale per `group` of inputs.

    Rows from `count` on pad both tensors, and may contain anything.
    """

    numbers: Tensor  # [R, I], R ≥ T, fp8
    scales: Tensor  # [⌈I / group⌉, R], fp32
    count: int  # T
    dtype: torch.dtype  # of what was quantised, and of products


# The weight of a linear layer.
Matrix = Tensor | Quantised


def bytes_of(numbers: Tensor) -> Tensor:
    """Return numbers with fp8 viewed as uint8, which all devices index and load."""
    return numbers.view(torch.uint8) if numbers.dtype == FP8 else numbers


def as_tensor(weight: Matrix) -> Tensor:
    """Return a plain weight as it is, a quantised one dequantised."""
    return weight.dequantised() if isinstance(weight, Quantised) else weight


def pack_int4(numbers: Tensor) -> Tensor:
    """Pack four bits `[…, O, I]` (uint8) into words, see `Quantised`; zeros pad a block."""
    lacking = -numbers.shape[-1] % BLOCK
    padded = torch.nn.functional.pad(numbers, (0, lacking))
    blocks = padded.view(*padded.shape[:-1], -1, 8, WORDS_A_BLOCK)
    words = blocks.new_zeros((*blocks.shape[:-2], WORDS_A_BLOCK), dtype=torch.int32)
    for place in range(8):
        words |= blocks[..., place, :].int() << 4 * place
    return words.flatten(-2)


def unpack_int4(words: Tensor, inputs: int) -> Tensor:
    """Unpack words to four bits `[…, O, I]` (uint8)."""
    blocks = words.view(*words.shape[:-1], -1, WORDS_A_BLOCK)
    numbers = [((blocks >> 4 * place) & 15).to(torch.uint8) for place in range(8)]
    return torch.stack(numbers, -2).flatten(-3)[..., :inputs]


def quantise_fp8(weight: Tensor) -> Quantised:
    """Quantise a weight `[…, O, I]` to fp8 with a scale per row; its largest number becomes 448."""
    return _quantise(weight, FP8, quantise_rows_fp8)


def quantise_int8(weight: Tensor, rotation: int | None = None) -> Quantised:
    """Quantise a weight `[…, O, I]` to int8 with a scale per row; its largest number becomes 127.

    Its inputs are rotated first, `rotation` of them together or as many as their count allows.
    """
    if rotation is None:
        rotation = rotation_of(weight.shape[-1])

    def quantise_rows(rows: Tensor, _group: int) -> tuple[Tensor, Tensor]:
        return _quantise_rows_int8(rotated(rows.float(), rotation))

    return replace(_quantise(weight, torch.int8, quantise_rows), rotation=rotation)


def rotation_of(*widths: int) -> int:
    """Return how many inputs rotate together: `ROTATED` if that divides all widths, else 1."""
    return 1 if any(width % ROTATED for width in widths) else ROTATED


def rotated(x: Tensor, size: int) -> Tensor:
    """Multiply each `size` neighbours of `x […, I]` by the normed Hadamard matrix, its own inverse.

    Both factors of a product may be rotated: that changes the product only by rounding errors, and
    makes inputs similar in size, so that they share a scale well (Ashkboos et al., QuaRot, 2024).
    """
    shape, half = x.shape, 1
    while half < size:
        first, second = x.reshape(*shape[:-1], -1, 2, half).unbind(-2)
        x = torch.stack([first + second, first - second], -2)
        half *= 2
    return x.reshape(shape) / sqrt(size)


def _quantise(
    weight: Tensor,
    dtype: torch.dtype,
    quantise_rows: Callable[[Tensor, int], tuple[Tensor, Tensor]],
) -> Quantised:
    """Quantise in chunks of rows, as temporaries take several times the memory of the rows."""
    numbers = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    scales = torch.empty(*weight.shape[:-1], 1, device=weight.device)
    tensors = (tensor.flatten(0, -2) for tensor in (weight, numbers, scales))
    every = (torch.split(tensor, ROWS_AT_ONCE) for tensor in tensors)
    for rows, own, of_rows in zip(*every, strict=True):
        made, scale = quantise_rows(rows, weight.shape[-1])
        own.copy_(made)
        of_rows.copy_(scale)
    return Quantised(
        numbers,
        scales,
        None,
        inputs=weight.shape[-1],
        group=weight.shape[-1],
        dtype=weight.dtype,
    )


def quantise_rows_fp8(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantise rows to fp8 `[T, I]` with scales `[T, ⌈I / group⌉]`; zeros have the scale 1."""
    rows, width = x.shape
    lacking = -width % group
    groups = torch.nn.functional.pad(x.float(), (0, lacking)).view(rows, -1, group)
    largest = groups.abs().amax(-1)
    scales = torch.where(largest > 0, largest / FP8_MAX, 1.0)
    numbers = (groups / scales[..., None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return numbers.flatten(1)[:, :width].contiguous(), scales


def _quantise_rows_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows to int8 `[T, I]` with scales `[T, 1]`; zeros have the scale 1."""
    largest = x.abs().amax(-1, keepdim=True)
    scales = torch.where(largest == 0, 1.0, largest / INT8_MAX)  # a NaN stays one
    return (x / scales).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scales


def rounded_to_fp8(x: Tensor, group: int) -> Tensor:
    """Quantise rows `[T, I]` to fp8 and dequantise them."""
    numbers, scales = quantise_rows_fp8(x, group)
    width = x.shape[-1]
    return Quantised(numbers, scales, None, width, min(group, width), x.dtype).dequantised()


def rounded_to_int8(x: Tensor, rotation: int) -> Tensor:
    """Quantise rows `[T, I]` to int8, rotated, and dequantise them."""
    return quantise_int8(x, rotation).dequantised()


def merge_quantised(
    shape: Sequence[int], parts: Sequence[tuple[Quantised, Callable[[Tensor], Tensor]]]
) -> Quantised | None:
    """Merge parts into one weight of a shape; None if they are quantised differently.

    A part's `place` takes a tensor `[…, O, any]` and returns the view of it that the part's rows
    fill one after the other, along one axis or several.
    """
    first, _ = parts[0]
    if len(parts) == 1 and first.shape == tuple(shape):
        return first
    if not all(_can_merge(first, part) for part, _ in parts):
        return None

    def merge_field(name: str) -> Tensor | None:
        of_first = getattr(first, name)
        if of_first is None:
            return None
        whole: Tensor = of_first.new_empty((*shape[:-1], of_first.shape[-1]))
        for part, place in parts:
            fill_rows(place(whole), getattr(part, name))
        return whole

    numbers, scales = merge_field("numbers"), merge_field("scales")
    assert numbers is not None
    assert scales is not None
    return replace(
        first,
        numbers=numbers,
        scales=scales,
        zeros=merge_field("zeros"),
        row_scales=merge_field("row_scales"),
    )


def fill_rows(place: Tensor, rows: Tensor) -> None:
    """Copy rows `[O, any]` to a place, which may have them along several axes: `[…, any]`."""
    place.copy_(rows.reshape(place.shape))


def _can_merge(one: Quantised, other: Quantised) -> bool:
    """Return whether two weights can be rows of one."""
    if one.order is not None and other.order is not None and not one.order.equal(other.order):
        return False
    return (one.kind, one.inputs) == (other.kind, other.inputs)
