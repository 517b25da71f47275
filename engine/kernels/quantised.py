"""Weights in numbers of few bits: what they stand for, how they are packed, how they are made.

There are two forms, whatever files have them as: fp8 (e4m3) numbers, and whole numbers of four bits
with a zero. In both, runs of a row's numbers share a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import lcm

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
# Of so many inputs the 4-bit numbers lie in words beside each other, each word those of eight
# inputs that are so far apart: a kernel takes neighbours out of neighbouring words by one shift.
BLOCK, APART = 128, 16
ROWS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Quantised:
    """A weight `[…, O, I]`: (number − zero) · scale, where `group` inputs of a row share the two.

    `numbers` are fp8 `[…, O, I]` without zeros, or int32 words `[…, O, ⌈I / 128⌉ · 16]`: word w of
    a block has the numbers of its inputs w, w + 16, …, w + 112, the lowest bits first. With an
    `order` column i is for input `order[i]`. It is multiplied as numbers of `dtype`.
    """

    numbers: Tensor
    scales: Tensor  # […, O, ⌈I / group⌉], fp32
    zeros: Tensor | None  # […, O, ⌈I / group⌉], uint8
    inputs: int
    group: int
    dtype: torch.dtype
    order: Tensor | None = None  # [I]

    @property
    def shape(self) -> torch.Size:
        """Return that of what it stands for."""
        return torch.Size((*self.numbers.shape[:-1], self.inputs))

    @property
    def device(self) -> torch.device:
        """Return where it lies."""
        return self.numbers.device

    @property
    def kind(self) -> tuple[torch.dtype, int, torch.dtype, bool]:
        """Return what a kernel for it goes by, beside its shape."""
        return self.numbers.dtype, self.group, self.dtype, self.order is None

    @property
    def nbytes(self) -> int:
        """Return how much memory it takes."""
        tensors = (self.numbers, self.scales, self.zeros, self.order)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def dequantised(self) -> Tensor:
        """Return what it stands for, `[…, O, I]`, computed in fp32 and rounded once."""
        if self.zeros is None:
            numbers = self.numbers.float()
        else:
            numbers = unpacked(self.numbers, self.inputs).float() - self._spread(self.zeros)
        weight = (numbers * self._spread(self.scales)).to(self.dtype)
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(-1, self.order, weight)

    def taken(self, rows: range, columns: range) -> Quantised | None:
        """Return neighbouring rows and columns; None where that cuts a group or a block."""
        is_one = self.group >= self.inputs
        step = lcm(1 if is_one else self.group, 1 if self.zeros is None else BLOCK)
        begin, end = columns.start, columns.stop
        is_cut = begin % step or (end % step and end < self.inputs)
        if len(columns) < self.inputs and (is_cut or self.order is not None):
            return None
        of_group = slice(None) if is_one else slice(begin // self.group, -(-end // self.group))
        words = slice(begin, end)
        if self.zeros is not None:
            words = slice(begin // BLOCK * APART, -(-end // BLOCK) * APART)
        own = slice(rows.start, rows.stop)
        return replace(
            self,
            numbers=self.numbers[own, words].contiguous(),
            scales=self.scales[own, of_group].contiguous(),
            zeros=None if self.zeros is None else self.zeros[own, of_group].contiguous(),
            inputs=len(columns),
            group=len(columns) if is_one else self.group,
        )

    def _spread(self, of_groups: Tensor) -> Tensor:
        """Return for each input what is told of its group."""
        return of_groups.float().repeat_interleave(self.group, -1)[..., : self.inputs]


# What is multiplied by.
Matrix = Tensor | Quantised


def as_tensor(weight: Matrix) -> Tensor:
    """Return a weight as it is, or what it stands for."""
    return weight.dequantised() if isinstance(weight, Quantised) else weight


def packed(numbers: Tensor) -> Tensor:
    """Return 4-bit numbers `[…, O, I]` (uint8) as words, see `Quantised`; what lacks is zero."""
    lacking = -numbers.shape[-1] % BLOCK
    padded = torch.nn.functional.pad(numbers, (0, lacking))
    blocks = padded.view(*padded.shape[:-1], -1, 8, APART)
    words = blocks.new_zeros((*blocks.shape[:-2], APART), dtype=torch.int32)
    for place in range(8):
        words |= blocks[..., place, :].int() << 4 * place
    return words.flatten(-2)


def unpacked(words: Tensor, inputs: int) -> Tensor:
    """Return the 4-bit numbers `[…, O, I]` (uint8) of words."""
    blocks = words.view(*words.shape[:-1], -1, APART)
    numbers = [((blocks >> 4 * place) & 15).to(torch.uint8) for place in range(8)]
    return torch.stack(numbers, -2).flatten(-3)[..., :inputs]


def to_fp8(weight: Tensor) -> Quantised:
    """Return a weight `[…, O, I]` as fp8 with a scale a row, the largest number's being 448.

    So many rows at once, as what is between takes several times as much as they do.
    """
    numbers = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scales = torch.empty(*weight.shape[:-1], 1, device=weight.device)
    tensors = (tensor.flatten(0, -2) for tensor in (weight, numbers, scales))
    every = (torch.split(tensor, ROWS_AT_ONCE) for tensor in tensors)
    for rows, own, of_rows in zip(*every, strict=True):
        made, scale = rows_to_fp8(rows, weight.shape[-1])
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


def rows_to_fp8(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return rows as fp8 `[T, I]` and scales `[T, ⌈I / group⌉]`; a row of zeros has the scale 1."""
    rows, width = x.shape
    lacking = -width % group
    groups = torch.nn.functional.pad(x.float(), (0, lacking)).view(rows, -1, group)
    largest = groups.abs().amax(-1)
    scales = torch.where(largest > 0, largest / FP8_MAX, 1.0)
    numbers = (groups / scales[..., None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return numbers.flatten(1)[:, :width].contiguous(), scales


def joined(
    shape: Sequence[int], parts: Sequence[tuple[Quantised, Callable[[Tensor], Tensor]]]
) -> Quantised | None:
    """Return one weight of a shape, with parts at their places; None where they are of two kinds.

    A place takes a tensor `[…, O, any]` and returns the view of it that a part fills.
    """
    first, _ = parts[0]
    if len(parts) == 1 and first.shape == tuple(shape):
        return first
    if not all(_are_alike(first, part) for part, _ in parts):
        return None

    def together(name: str) -> Tensor | None:
        of_first = getattr(first, name)
        if of_first is None:
            return None
        whole: Tensor = of_first.new_empty((*shape[:-1], of_first.shape[-1]))
        for part, place in parts:
            place(whole).copy_(getattr(part, name))
        return whole

    numbers, scales = together("numbers"), together("scales")
    assert numbers is not None
    assert scales is not None
    return replace(first, numbers=numbers, scales=scales, zeros=together("zeros"))


def _are_alike(one: Quantised, other: Quantised) -> bool:
    """Say whether two weights may be rows of one."""
    if one.order is not None and other.order is not None and not one.order.equal(other.order):
        return False
    return (one.kind, one.inputs) == (other.kind, other.inputs)
