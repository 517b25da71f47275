"""Formats of quantised matrices `[O, I]` in files: fp8, AWQ, GPTQ, integers, NVFP4, mxfp4.

The stored tensors decide: a checkpoint may have quantised matrices and others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ....kernels.quantised import Quantised, pack_int4
from ...config.hf_config import UnsupportedConfig

# Quantisers write a scale of 0 only if the scaled numbers are 0 or close to it.
MOST_ZERO_SCALES = 0.1
FLOATS = frozenset({"F32", "F16", "BF16"})
WORDS = frozenset({"I32"})
NUMBERS = frozenset({"F8_E4M3"})
BYTES = frozenset({"U8"})
INTEGERS = frozenset({"I8"})
# A word contains eight numbers of four bits, or four of eight.
WORD_BITS, FOUR_BITS, IN_WORD = 32, 4, 8
# AWQ's order of the numbers in a word.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
# mxfp4: the number of inputs that share a scale; and the scale 2¹⁷, which no weight exceeds.
MXFP4_GROUP, MXFP4_LARGEST_SCALE = 32, 127 + 17
NVFP4_GROUP = 16


class Damaged(Exception):
    """Error for stored tensors that no quantiser writes: the file is damaged."""


class TensorSpec(NamedTuple):
    """A tensor of a matrix: its possible shapes and dtypes."""

    shapes: tuple[tuple[int, ...], ...]
    kinds: frozenset[str]


class MainTensor(NamedTuple):
    """The tensor that every quantised matrix of a format has: its name and dtypes."""

    name: str
    kinds: frozenset[str]


class WeightFormat(Protocol):
    """A format. Tensors are named by a suffix after their module's name.

    If matrices are stacked, all experts' are one tensor, and shapes begin with their number.
    """

    is_stacked: ClassVar[bool]

    @property
    def main_tensor(self) -> MainTensor:
        """Return the tensor that shows that a matrix is in this format."""

    @property
    def has_product(self) -> bool:
        """Return whether kernels multiply it; otherwise it is dequantised."""

    def matrix_shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the matrix whose main tensor has a given shape."""

    def tensor_specs(
        self, shape: tuple[int, ...], has: Callable[[str], bool]
    ) -> dict[str, TensorSpec]:
        """Return the tensors of a matrix; some of them are optional."""

    def read(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype
    ) -> Quantised:
        """Return a matrix, of one expert if they are stacked, multiplied in a dtype."""


@dataclass(frozen=True, slots=True)
class Fp8:
    """Numbers of eight bits, with one scale, one per row, or one per block of a size."""

    block: tuple[int, int] | None

    is_stacked: ClassVar[bool] = False
    main_tensor: ClassVar[MainTensor] = MainTensor("weight", NUMBERS)

    @property
    def has_product(self) -> bool:
        """See `WeightFormat`."""
        return True

    def matrix_shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """See `WeightFormat`."""
        return stored

    def tensor_specs(
        self, shape: tuple[int, ...], has: Callable[[str], bool]
    ) -> dict[str, TensorSpec]:
        """See `WeightFormat`; scales have either of two names."""
        outputs, inputs = shape
        shapes: tuple[tuple[int, ...], ...] = ((outputs, 1), (outputs,), (), (1,), (1, 1))
        if self.block is not None:
            shapes = ((-(-outputs // self.block[0]), -(-inputs // self.block[1])),)
        name = "weight_scale_inv" if has("weight_scale_inv") else "weight_scale"
        return {"weight": TensorSpec((shape,), NUMBERS), name: TensorSpec(shapes, FLOATS)}

    def read(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype
    ) -> Quantised:
        """See `WeightFormat`; each row gets its own scales, so that matrices can be stacked."""
        if bool((tensors["weight"].view(torch.uint8) & 127 == 127).any()):
            raise Damaged("its fp8 numbers contain NaN")
        (scale,) = (tensor for name, tensor in tensors.items() if name != "weight")
        scale, (height, width) = scale.float(), self.block or shape
        if self.block is None:
            rows = scale.reshape(-1, 1).expand(shape[0], 1)
        else:
            rows = scale.repeat_interleave(height, 0)[: shape[0]]
        if bool((rows < 0).any()):
            raise Damaged("it has negative scales")
        if bool((rows == 0).any()):
            columns = rows.repeat_interleave(width, 1)[:, : shape[1]]
            if bool(((tensors["weight"].view(torch.uint8) & 127 != 0) & (columns == 0)).any()):
                raise Damaged("it has scales of 0 for numbers other than 0")
        return Quantised(tensors["weight"], rows.contiguous(), None, shape[1], width, dtype)


@dataclass(frozen=True, slots=True)
class Awq:
    """Numbers of four bits with zeros, packed by outputs in AWQ's order."""

    group: int | None

    is_stacked: ClassVar[bool] = False
    main_tensor: ClassVar[MainTensor] = MainTensor("qweight", WORDS)

    @property
    def has_product(self) -> bool:
        """See `WeightFormat`."""
        return True

    def matrix_shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """See `WeightFormat`."""
        return stored[1] * IN_WORD, stored[0]

    def tensor_specs(
        self, shape: tuple[int, ...], has: Callable[[str], bool]
    ) -> dict[str, TensorSpec]:
        """See `WeightFormat`."""
        del has
        outputs, inputs = shape
        groups = _count_groups(inputs, self.group)
        return {
            "qweight": TensorSpec(((inputs, -(-outputs // IN_WORD)),), WORDS),
            "qzeros": TensorSpec(((groups, -(-outputs // IN_WORD)),), WORDS),
            "scales": TensorSpec(((groups, outputs),), FLOATS),
        }

    def read(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype
    ) -> Quantised:
        """See `WeightFormat`."""
        numbers, zeros = (
            _numbers(tensors[name], FOUR_BITS, AWQ_ORDER).T[: shape[0]]
            for name in ("qweight", "qzeros")
        )
        return _quantised(
            numbers, tensors["scales"].T, zeros, shape[1], group=self.group, dtype=dtype
        )


@dataclass(frozen=True, slots=True)
class Gptq:
    """Numbers of four or eight bits packed by inputs; its first version stores zeros minus one.

    The group of each input is stored, because groups may be sorted by importance: it is required if
    `is_sorted`.
    """

    group: int | None
    zeros_lack: int
    is_sorted: bool = False
    bits: int = FOUR_BITS

    is_stacked: ClassVar[bool] = False
    main_tensor: ClassVar[MainTensor] = MainTensor("qweight", WORDS)

    @property
    def has_product(self) -> bool:
        """See `WeightFormat`."""
        return self.bits == FOUR_BITS

    def matrix_shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """See `WeightFormat`."""
        return stored[1], stored[0] * (WORD_BITS // self.bits)

    def tensor_specs(
        self, shape: tuple[int, ...], has: Callable[[str], bool]
    ) -> dict[str, TensorSpec]:
        """See `WeightFormat`."""
        outputs, inputs = shape
        groups, in_word = _count_groups(inputs, self.group), WORD_BITS // self.bits
        specs = {
            "qweight": TensorSpec(((-(-inputs // in_word), outputs),), WORDS),
            "qzeros": TensorSpec(((groups, -(-outputs // in_word)),), WORDS),
            "scales": TensorSpec(((groups, outputs),), FLOATS),
        }
        has_order = self.is_sorted or has("g_idx")
        return specs | ({"g_idx": TensorSpec(((inputs,),), WORDS)} if has_order else {})

    def read(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype
    ) -> Quantised:
        """See `WeightFormat`."""
        numbers = _numbers(tensors["qweight"].T, self.bits)[:, : shape[1]]
        zeros = _numbers(tensors["qzeros"], self.bits).T[: shape[0]].int() + self.zeros_lack
        zeros = (zeros & ((1 << self.bits) - 1)).to(torch.uint8)
        weight = (numbers, tensors["scales"].T, zeros)
        groups = tensors.get("g_idx")
        return _quantised(
            *weight, shape[1], group=self.group, dtype=dtype, groups=groups, bits=self.bits
        )


@dataclass(frozen=True, slots=True)
class PackQuantized:
    """Numbers of four or eight bits packed by inputs, as in compressed-tensors; zeros by outputs.

    If `is_sorted`, the group of each input must be stored.
    """

    group: int | None
    is_symmetric: bool
    is_sorted: bool = False
    bits: int = FOUR_BITS

    is_stacked: ClassVar[bool] = False
    main_tensor: ClassVar[MainTensor] = MainTensor("weight_packed", WORDS)

    @property
    def has_product(self) -> bool:
        """See `WeightFormat`."""
        return self.bits == FOUR_BITS

    def matrix_shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """See `WeightFormat`."""
        return stored[0], stored[1] * (WORD_BITS // self.bits)

    def tensor_specs(
        self, shape: tuple[int, ...], has: Callable[[str], bool]
    ) -> dict[str, TensorSpec]:
        """See `WeightFormat`."""
        outputs, inputs = shape
        groups, in_word = _count_groups(inputs, self.group), WORD_BITS // self.bits
        specs = {
            "weight_packed": TensorSpec(((outputs, -(-inputs // in_word)),), WORDS),
            "weight_scale": TensorSpec(((outputs, groups),), FLOATS),
        }
        if not self.is_symmetric:
            specs["weight_zero_point"] = TensorSpec(((-(-outputs // in_word), groups),), WORDS)
        if self.is_sorted or has("weight_g_idx"):
            specs["weight_g_idx"] = TensorSpec(((inputs,),), WORDS)
        return specs

    def read(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype
    ) -> Quantised:
        """See `WeightFormat`; without zeros the zero is the middle of the range."""
        outputs, inputs = shape
        numbers = _numbers(tensors["weight_packed"], self.bits)[:, :inputs]
        scales = tensors["weight_scale"]
        if self.is_symmetric:
            zeros = torch.full_like(scales, 1 << (self.bits - 1), dtype=torch.uint8)
        else:
            zeros = _numbers(tensors["weight_zero_point"].T, self.bits).T[:outputs]
        weight = (numbers, scales, zeros)
        groups = tensors.get("weight_g_idx")
        return _quantised(
            *weight, inputs, group=self.group, dtype=dtype, groups=groups, bits=self.bits
        )


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Numbers e2m1 of stacked experts, two per byte, with one e8m0 scale per 32 inputs.

    This is the OCP's microscaling format, in which GPT-OSS is published: `[E, O, ⌈I / 32⌉, 16]`,
    with the first of two neighbours in the lower bits.
    """

    is_stacked: ClassVar[bool] = True
    main_tensor: ClassVar[MainTensor] = MainTensor("blocks", BYTES)

    @property
    def has_product(self) -> bool:
        """See `WeightFormat`."""
        return True

    def matrix_shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """See `WeightFormat`."""
        return *stored[:2], stored[2] * MXFP4_GROUP

    def tensor_specs(
        self, shape: tuple[int, ...], has: Callable[[str], bool]
    ) -> dict[str, TensorSpec]:
        """See `WeightFormat`."""
        del has
        groups = (*shape[:-1], _count_groups(shape[-1], MXFP4_GROUP))
        return {
            "blocks": TensorSpec(((*groups, MXFP4_GROUP // 2),), BYTES),
            "scales": TensorSpec((groups,), BYTES),
        }

    def read(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype
    ) -> Quantised:
        """See `WeightFormat`."""
        outputs, inputs = shape
        blocks = tensors["blocks"].view(outputs, -1)
        return _mxfp4(blocks, tensors["scales"].view(outputs, -1), inputs, dtype)


class _Pairs:
    """A format of one matrix with two numbers per byte."""

    __slots__ = ()
    is_stacked: ClassVar[bool] = False

    @property
    def has_product(self) -> bool:
        """See `WeightFormat`."""
        return True

    def matrix_shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """See `WeightFormat`."""
        return stored[0], stored[1] * 2


@dataclass(frozen=True, slots=True)
class PackedMxfp4(_Pairs):
    """Numbers e2m1 of one matrix, two per byte, with one e8m0 scale per 32 inputs.

    This is compressed-tensors' mxfp4-pack-quantized.
    """

    main_tensor: ClassVar[MainTensor] = MainTensor("weight_packed", BYTES)

    def tensor_specs(
        self, shape: tuple[int, ...], has: Callable[[str], bool]
    ) -> dict[str, TensorSpec]:
        """See `WeightFormat`."""
        del has
        outputs, inputs = shape
        return {
            "weight_packed": TensorSpec(((outputs, -(-inputs // 2)),), BYTES),
            "weight_scale": TensorSpec(((outputs, _count_groups(inputs, MXFP4_GROUP)),), BYTES),
        }

    def read(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype
    ) -> Quantised:
        """See `WeightFormat`."""
        return _mxfp4(tensors["weight_packed"], tensors["weight_scale"], shape[1], dtype)


@dataclass(frozen=True, slots=True)
class Nvfp4(_Pairs):
    """Numbers e2m1, two per byte, with one e4m3 scale per 16 inputs and one fp32 scale of all.

    ModelOpt stores the scale of all. compressed-tensors (`is_inverse`) stores its inverse, and has
    other names.
    """

    is_inverse: bool

    @property
    def main_tensor(self) -> MainTensor:
        """See `WeightFormat`."""
        return MainTensor("weight_packed" if self.is_inverse else "weight", BYTES)

    def tensor_specs(
        self, shape: tuple[int, ...], has: Callable[[str], bool]
    ) -> dict[str, TensorSpec]:
        """See `WeightFormat`."""
        del has
        outputs, inputs = shape
        groups = _count_groups(inputs, NVFP4_GROUP)
        return {
            self.main_tensor.name: TensorSpec(((outputs, -(-inputs // 2)),), BYTES),
            "weight_scale": TensorSpec(((outputs, groups),), NUMBERS),
            self._scale_of_all: TensorSpec(((), (1,)), FLOATS),
        }

    def read(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype
    ) -> Quantised:
        """See `WeightFormat`; each row gets the scale of all, so that matrices can be merged."""
        outputs, inputs = shape
        scales, of_all = tensors["weight_scale"], tensors[self._scale_of_all].float().view(1, 1)
        bits = scales.view(torch.uint8)
        if bool((bits & 127 == 127).any()):
            raise Damaged("its scales contain NaN")
        if bool((bits > 128).any()):
            raise Damaged("it has negative scales")
        if float((bits & 127 == 0).float().mean()) > MOST_ZERO_SCALES:
            raise Damaged("its scales are 0")
        if not bool(of_all > 0):
            raise Damaged(f"its {self._scale_of_all} is 0 or negative")
        if self.is_inverse:
            of_all = 1 / of_all
        return Quantised(
            pack_int4(_codes(tensors[self.main_tensor.name], inputs)),
            scales.contiguous(),
            None,
            inputs,
            NVFP4_GROUP,
            dtype,
            row_scales=of_all.expand(outputs, 1).contiguous(),
        )

    @property
    def _scale_of_all(self) -> str:
        return "weight_global_scale" if self.is_inverse else "weight_scale_2"


@dataclass(frozen=True, slots=True)
class IntQuantized:
    """Integers of compressed-tensors, one per byte: of eight bits, or of four (W4A8).

    The files quantise activations as well (W8A8); a `group` of None is a row or the whole matrix.
    """

    group: int | None
    is_symmetric: bool
    bits: int

    is_stacked: ClassVar[bool] = False
    main_tensor: ClassVar[MainTensor] = MainTensor("weight", INTEGERS)

    @property
    def has_product(self) -> bool:
        """See `WeightFormat`."""
        return self.bits == FOUR_BITS

    def matrix_shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """See `WeightFormat`."""
        return stored

    def tensor_specs(
        self, shape: tuple[int, ...], has: Callable[[str], bool]
    ) -> dict[str, TensorSpec]:
        """See `WeightFormat`."""
        del has
        outputs, inputs = shape
        shapes: tuple[tuple[int, ...], ...] = ((outputs, 1), (outputs,), (), (1,), (1, 1))
        if self.group is not None:
            shapes = ((outputs, _count_groups(inputs, self.group)),)
        specs = {
            "weight": TensorSpec((shape,), INTEGERS),
            "weight_scale": TensorSpec(shapes, FLOATS),
        }
        if not self.is_symmetric:
            specs["weight_zero_point"] = TensorSpec(shapes, INTEGERS)
        return specs

    def read(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype
    ) -> Quantised:
        """See `WeightFormat`; numbers become unsigned, so that the middle of the range is 0."""
        outputs, inputs = shape
        middle, groups = 1 << (self.bits - 1), _count_groups(inputs, self.group)

        def of_groups(tensor: Tensor) -> Tensor:
            return tensor.reshape(-1, groups).expand(outputs, groups)

        scales, numbers = of_groups(tensors["weight_scale"]), tensors["weight"].short()
        if int(numbers.min()) < -middle or int(numbers.max()) >= middle:
            raise Damaged(f"its numbers need more than {self.bits} bits")
        zeros = torch.full_like(scales, middle, dtype=torch.uint8)
        if not self.is_symmetric:
            zeros = (of_groups(tensors["weight_zero_point"]).short() + middle).to(torch.uint8)
        weight = ((numbers + middle).to(torch.uint8), scales, zeros)
        return _quantised(*weight, inputs, group=self.group, dtype=dtype, bits=self.bits)


def _mxfp4(blocks: Tensor, scales: Tensor, inputs: int, dtype: torch.dtype) -> Quantised:
    """Return bytes of two numbers e2m1 `[O, ⌈I / 2⌉]` with e8m0 scales `[O, G]` as one weight."""
    if float((scales == 0).float().mean()) > MOST_ZERO_SCALES:
        raise Damaged("its scales are 0")
    if int(scales.max()) > MXFP4_LARGEST_SCALE:
        raise Damaged(f"its scales reach 2**{int(scales.max()) - 127}")
    words = pack_int4(_codes(blocks, inputs))
    return Quantised(words, scales.contiguous(), None, inputs, MXFP4_GROUP, dtype)


def _codes(pairs: Tensor, inputs: int) -> Tensor:
    """Return the codes in bytes, `[O, ⌈I / 2⌉]` → `[O, I]`, the first one in the lower bits."""
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)[:, :inputs]


def _count_groups(inputs: int, group: int | None) -> int:
    return 1 if group is None else -(-inputs // group)


def _numbers(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Return the numbers in words, `[N, W]` → `[N, W · 32 / bits]`, in an order of their places."""
    places, most = order or range(WORD_BITS // bits), (1 << bits) - 1
    numbers = [((words >> bits * place) & most).to(torch.uint8) for place in places]
    return torch.stack(numbers, -1).flatten(1)


def _quantised(
    numbers: Tensor,
    scales: Tensor,
    zeros: Tensor,
    inputs: int,
    *,
    group: int | None,
    dtype: torch.dtype,
    groups: Tensor | None = None,
    bits: int = FOUR_BITS,
) -> Quantised:
    """Return numbers `[O, I]` with scales and zeros `[O, G]` as one weight.

    `groups [I]` is the group of each input; if they are not in order, the inputs are sorted by
    group. Scales may be below 0, as in AutoRound.
    """
    if not bool((scales > 0).any()) or float((scales == 0).float().mean()) > MOST_ZERO_SCALES:
        raise Damaged("its scales are 0 or negative")
    size = inputs if group is None else group
    order = None
    if groups is not None:
        regular = torch.arange(inputs, device=groups.device) // size
        if not torch.equal(groups, regular.to(groups.dtype)):
            order = groups.argsort(stable=True)
            if not torch.equal(groups[order], regular.to(groups.dtype)):
                raise UnsupportedConfig(f"its inputs are not in groups of {size} columns")
            numbers = numbers[:, order]
    scales, zeros = scales.float().contiguous(), zeros.contiguous()
    if bits != FOUR_BITS:
        spread = zeros.short().repeat_interleave(size, 1)[:, :inputs]
        return Quantised(numbers.short() - spread, scales, None, inputs, size, dtype, order)
    return Quantised(pack_int4(numbers.contiguous()), scales, zeros, inputs, size, dtype, order)
