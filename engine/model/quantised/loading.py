"""Loading of quantised weights: finds them by the stored tensors, and fills them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ...errors import ModelRefused
from ...kernels.backends import has_quantised_linear
from ...kernels.quantised import Matrix, Quantised, merge_quantised, quantise_fp8
from ..weight_map import Part, Weight, whole
from .formats import FLOATS, Damaged, WeightFormat
from .quantization_config import QuantizationConfig

# The products that are made fp8 as they are read: neither embedding, head nor routers.
MADE_FP8 = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
# What older checkpoints store although it follows from the config.
DERIVED = re.compile(r"rotary_emb\.inv_freq")
# Of activations and of the KV cache, which are scaled by what they are; a shape that is known.
IGNORED = re.compile(
    rf"{DERIVED.pattern}|\.(input|activation|[kvq]|kv|output|prob)_scale$|\.weight_shape$"
)
WEIGHT = ".weight"


class TensorInfo(Protocol):
    """A tensor in a file, of which kind and shape are told."""

    @property
    def kind(self) -> str:
        """Return what its numbers are."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return its shape."""


TensorInfoT = TypeVar("TensorInfoT", bound=TensorInfo)
Fill = Callable[[Sequence[Weight]], dict[str, Tensor]]
TensorSpecs = dict[str, Weight]


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a load: `plain` weights are copied, quantised ones read part by part.

    A part without pieces is not quantised, though its weight's others are. `made_fp8` are plain in
    the files. `name` is the model's.
    """

    plain: tuple[Weight, ...]
    made_fp8: tuple[Weight, ...] = ()
    quantised: tuple[tuple[Weight, tuple[TensorSpecs, ...]], ...] = ()
    weight_format: WeightFormat | None = None
    name: str = ""

    def tensors(self) -> list[Weight]:
        """Return all that must be stored, and as what."""
        wanted = [*self.plain, *self.made_fp8]
        for weight, parts in self.quantised:
            for part, tensor_specs in zip(weight.parts, parts, strict=True):
                wanted += tensor_specs.values() if tensor_specs else [_alone(part)]
        return wanted

    def read(
        self, fill: Fill, dtype: torch.dtype, device: torch.device
    ) -> Iterator[tuple[str, Matrix]]:
        """Yield weights by their roles; where nothing multiplies quantised ones, without that."""
        yield from fill(self.plain).items()
        keeps = has_quantised_linear(dtype, device)
        for weight in self.made_fp8:
            whole_rows, columns = _with_whole_rows(weight)
            made = _columns_of(quantise_fp8(fill([whole_rows])[weight.role]), columns)
            yield weight.role, made if keeps else made.dequantised()
        for weight, parts in self.quantised:
            whole = self._joined(weight, parts, fill, dtype) if keeps else None
            if whole is None:
                yield weight.role, self._dequantised(weight, parts, fill, dtype, device)
            else:
                yield weight.role, whole

    def _joined(
        self, weight: Weight, parts: Sequence[TensorSpecs], fill: Fill, dtype: torch.dtype
    ) -> Quantised | None:
        """Return a weight of its parts; None where these are of two kinds, or cut apart."""
        read = []
        for part, tensor_specs in zip(weight.parts, parts, strict=True):
            if not tensor_specs:
                return None
            own = self._quantised(part, tensor_specs, fill, dtype).submatrix(*_read_ranges(part))
            if own is None:
                return None
            read.append((own, part.place))
        return merge_quantised(weight.shape, read)

    def _dequantised(
        self,
        weight: Weight,
        parts: Sequence[TensorSpecs],
        fill: Fill,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Return what a weight stands for, part by part."""
        fill_weights = torch.empty(weight.shape, dtype=dtype, device=device)
        for part, tensor_specs in zip(weight.parts, parts, strict=True):
            if tensor_specs:
                rows, columns = _read_ranges(part)
                read = self._quantised(part, tensor_specs, fill, dtype).dequantised()
                read = read[rows.start : rows.stop, columns.start : columns.stop]
            else:
                read = fill([_alone(part)])[part.key]
            place = part.place(fill_weights)
            place.copy_(read.reshape(place.shape))
        return fill_weights

    def _quantised(
        self, part: Part, tensor_specs: TensorSpecs, fill: Fill, dtype: torch.dtype
    ) -> Quantised:
        assert self.weight_format is not None
        tensors = fill(list(tensor_specs.values()))
        named = {name: tensors[weight.role] for name, weight in tensor_specs.items()}
        outputs, inputs = part.shape
        try:
            return self.weight_format.read(named, (outputs, inputs), dtype)
        except Damaged as exc:
            raise ModelRefused(
                f"{self.name}: {_module(part)}: {exc}: its files are damaged, or were not written "
                "as they should be: copy or fetch them again."
            ) from exc


def plan_loading(
    name: str,
    quantization: QuantizationConfig | None,
    wanted: Sequence[Weight],
    stored: Mapping[str, TensorInfo],
) -> Plan:
    """Return how weights of the model `name` are filled from what is stored."""
    if quantization is None:
        return Plan(tuple(wanted))
    if (weight_format := quantization.weight_format) is None:
        made = [weight for weight in wanted if weight.role.partition(".")[2] in MADE_FP8]
        return Plan(tuple(weight for weight in wanted if weight not in made), tuple(made))
    plain, quantised = [], []
    for weight in wanted:
        parts = tuple(_tensor_specs(weight_format, part, stored) for part in weight.parts)
        if any(parts):
            quantised.append((weight, parts))
        else:
            plain.append(weight)
    return Plan(tuple(plain), quantised=tuple(quantised), weight_format=weight_format, name=name)


def names_of(quantization: QuantizationConfig | None, wanted: Sequence[Weight]) -> list[str]:
    """Return the names of all tensors that quantised matrices may have."""
    if quantization is None or quantization.weight_format is None:
        return []
    names = []
    for part in (part for weight in wanted for part in weight.parts if _is_matrix(part)):
        outputs, inputs = part.shape
        for names_of_form in (
            quantization.weight_format.tensor_specs((outputs, inputs), lambda _: True),
            quantization.weight_format.tensor_specs((outputs, inputs), lambda _: False),
        ):
            names += [f"{_module(part)}.{name}" for name in names_of_form]
    return names


def without_empty_biases(
    quantization: QuantizationConfig | None,
    wanted: Sequence[Weight],
    stored: Mapping[str, TensorInfoT],
    fill: Fill,
) -> dict[str, TensorInfoT]:
    """Return what is stored but biases of zeros, which some tools write beside every matrix.

    Only those are left out that the network has no place for.
    """
    if quantization is None or quantization.weight_format is None:
        return dict(stored)
    keys = {part.key for weight in wanted for part in weight.parts}
    modules = {_module(part) for weight in wanted for part in weight.parts if _is_matrix(part)}
    biases = {f"{module}.bias" for module in modules} & stored.keys() - keys
    empty = {
        key
        for key in sorted(biases)
        if stored[key].kind in FLOATS and not fill([whole(key, key, *stored[key].shape)])[key].any()
    }
    return {key: tensor for key, tensor in stored.items() if key not in empty}


def _tensor_specs(
    weight_format: WeightFormat, part: Part, stored: Mapping[str, TensorInfo]
) -> TensorSpecs:
    """Return the tensors of a part that is quantised; none where it is not."""
    module, (main_tensor, kinds) = _module(part), weight_format.main_tensor
    main = stored.get(f"{module}.{main_tensor}")
    if not _is_matrix(part) or main is None or main.kind not in kinds:
        return {}
    outputs, inputs = part.shape
    tensor_specs = {}
    lie = weight_format.tensor_specs((outputs, inputs), lambda name: f"{module}.{name}" in stored)
    for name, piece in lie.items():
        key = f"{module}.{name}"
        there = stored[key].shape if key in stored else None
        shape = there if there in piece.shapes else piece.shapes[0]
        tensor_specs[name] = whole(key, key, *shape, kinds=piece.kinds)
    return tensor_specs


def _is_matrix(part: Part) -> bool:
    return part.key.endswith(WEIGHT) and len(part.shape) == 2


def _module(part: Part) -> str:
    return part.key.removesuffix(WEIGHT)


def _read_ranges(part: Part) -> tuple[range, range]:
    """Return which rows and columns of a matrix are read."""
    rows, columns = (*part.taken, *map(range, part.shape[len(part.taken) :]))
    return rows, columns


def _with_whole_rows(weight: Weight) -> tuple[Weight, range | None]:
    """Return a weight with all of its columns, by which rows are scaled, and those to be kept."""
    first = weight.parts[0]
    if len(first.taken) < 2 or len(first.taken[1]) == first.shape[1]:
        return weight, None
    parts = tuple(
        replace(part, taken=(part.taken[0], range(part.shape[1]), *part.taken[2:]))
        for part in weight.parts
    )
    shape = (*weight.shape[:-1], first.shape[1])
    return replace(weight, shape=shape, parts=parts), first.taken[1]


def _columns_of(whole: Quantised, columns: range | None) -> Quantised:
    """Return neighbouring columns of a weight whose rows have one scale each; None is all."""
    if columns is None:
        return whole
    numbers = whole.numbers[..., columns.start : columns.stop].contiguous()
    return replace(whole, numbers=numbers, inputs=len(columns), group=len(columns))


def _alone(part: Part) -> Weight:
    """Return what is read of a tensor as a weight of its own."""
    itself = replace(part, place=lambda weight: weight)
    return Weight(part.key, part.read_shape, (itself,))
