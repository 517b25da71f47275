"""Loading of quantised weights: finds them by the stored tensors, and fills them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ....errors import ModelRefused
from ....kernels.backends import has_quantised_linear
from ....kernels.quantised import (
    Matrix,
    Quantised,
    fill_rows,
    merge_quantised,
    quantise_fp8,
    quantise_int8,
    rotation_of,
)
from ..weight_parts import Part, Place, Weight, whole
from .formats import FLOATS, MXFP4_GROUP, Damaged, WeightFormat
from .quantization_config import QuantizationConfig

# The products that are quantised during the load: neither embedding, head nor routers.
MADE = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
# Tensors that older checkpoints store although they follow from the config.
DERIVED = re.compile(r"rotary_emb\.inv_freq|\.(attn|attention)\.(masked_)?bias$")
# Scales of activations and of the KV cache, which we compute at run time; their shape is known.
IGNORED = re.compile(
    rf"{DERIVED.pattern}|\.(input|activation|[kvq]|kv|output|prob)(_global)?_scale$"
    r"|\.(input|[kvq])_zero_point$|\.weight_shape$"
)
WEIGHT = ".weight"
STACKED_AXES = 3


class TensorInfo(Protocol):
    """A tensor in a file, with a required dtype and shape."""

    @property
    def kind(self) -> str:
        """Return its dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return its shape."""


TensorInfoT = TypeVar("TensorInfoT", bound=TensorInfo)
Fill = Callable[[Sequence[Weight]], dict[str, Tensor]]
TensorSpecs = dict[str, Weight]


class QuantisedPart(NamedTuple):
    """The tensors of a quantised part of a weight, and their format."""

    weight_format: WeightFormat
    tensor_specs: TensorSpecs


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a load: `plain` weights are copied, quantised ones read part by part.

    A part that is None is not quantised, though its weight's others are. `made` are plain in the
    files, and quantised by the `method`. `name` is the model's.
    """

    plain: tuple[Weight, ...]
    made: tuple[Weight, ...] = ()
    method: str = ""
    quantised: tuple[tuple[Weight, tuple[QuantisedPart | None, ...]], ...] = ()
    name: str = ""

    def tensors(self) -> list[Weight]:
        """Return all required tensors, with their dtypes and shapes."""
        wanted = [*self.plain, *self.made]
        for weight, parts in self.quantised:
            for part, own in zip(weight.parts, parts, strict=True):
                wanted += [_alone(part)] if own is None else own.tensor_specs.values()
        return wanted

    def read(
        self, fill: Fill, dtype: torch.dtype, device: torch.device
    ) -> Iterator[tuple[str, Matrix]]:
        """Yield weights by role; they are dequantised if the device has no product for them."""
        yield from fill(self.plain).items()
        keeps = has_quantised_linear(dtype, device, self.method)
        quantise = _quantise_int8 if self.method == "int8" else _quantise_fp8
        for weight in self.made:
            whole_rows, columns = _with_whole_rows(weight)
            made = _columns_of(quantise(fill([whole_rows])[weight.role], columns), columns)
            yield weight.role, made if keeps else made.dequantised()
        for weight, parts in self.quantised:
            whole = self._joined(weight, parts, fill, dtype) if keeps else None
            if whole is None:
                yield weight.role, self._dequantised(weight, parts, fill, dtype, device)
            else:
                yield weight.role, whole

    def _joined(
        self, weight: Weight, parts: Sequence[QuantisedPart | None], fill: Fill, dtype: torch.dtype
    ) -> Quantised | None:
        """Return a weight of its parts; None if parts are of two kinds, or were split."""
        read = []
        for part, stored in zip(weight.parts, parts, strict=True):
            if stored is None:
                return None
            own = self._quantised(part, stored, fill, dtype).submatrix(*_read_ranges(part))
            if own is None:
                return None
            read.append((own, part.place))
        return merge_quantised(weight.shape, read)

    def _dequantised(
        self,
        weight: Weight,
        parts: Sequence[QuantisedPart | None],
        fill: Fill,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Return a dequantised weight, part by part."""
        fill_weights = torch.empty(weight.shape, dtype=dtype, device=device)
        for part, stored in zip(weight.parts, parts, strict=True):
            if stored is not None:
                rows, columns = _read_ranges(part)
                read = self._quantised(part, stored, fill, dtype).dequantised()
                read = read[rows.start : rows.stop, columns.start : columns.stop]
            else:
                read = fill([_alone(part)])[part.key]
            fill_rows(part.place(fill_weights), read)
        return fill_weights

    def _quantised(
        self, part: Part, stored: QuantisedPart, fill: Fill, dtype: torch.dtype
    ) -> Quantised:
        tensors = fill(list(stored.tensor_specs.values()))
        named = {name: tensors[weight.role] for name, weight in stored.tensor_specs.items()}
        outputs, inputs = part.shape
        try:
            return stored.weight_format.read(named, (outputs, inputs), dtype)
        except Damaged as exc:
            raise ModelRefused(
                f"{self.name}: {_prefix(part)[:-1]}: {exc}: its files are damaged or were written "
                "incorrectly: copy or fetch them again."
            ) from exc


def plan_loading(
    name: str,
    quantization: QuantizationConfig | None,
    wanted: Sequence[Weight],
    stored: Mapping[str, TensorInfo],
) -> Plan:
    """Return how the weights of the model `name` are filled from the stored tensors."""
    if quantization is None:
        return Plan(tuple(wanted))
    method = quantization.product
    if quantization.is_made_at_load:
        made = [weight for weight in wanted if is_made(weight, method)]
        return Plan(tuple(weight for weight in wanted if weight not in made), tuple(made), method)
    plain: list[Weight] = []
    quantised: list[tuple[Weight, tuple[QuantisedPart | None, ...]]] = []
    for weight in wanted:
        parts = tuple(_quantised_part(quantization, part, stored) for part in weight.parts)
        first = parts[0]
        if first is not None and first.weight_format.is_stacked:
            quantised.append(_by_experts(weight, first))
        elif any(parts):
            quantised.append((weight, parts))
        else:
            plain.append(weight)
    return Plan(tuple(plain), method=method, quantised=tuple(quantised), name=name)


def _quantise_int8(weight: Tensor, columns: range | None) -> Quantised:
    """Quantise a weight, keeping some columns: those inputs are not rotated with the others."""
    bounds = (0, weight.shape[-1]) if columns is None else (columns.start, columns.stop)
    return quantise_int8(weight, rotation_of(*bounds))


def _quantise_fp8(weight: Tensor, _columns: range | None) -> Quantised:
    return quantise_fp8(weight)


def is_made(weight: Weight, method: str) -> bool:
    """Return whether a weight is quantised during the load."""
    has_experts = len(weight.shape) == 3
    is_product = weight.role.partition(".")[2] in MADE
    return is_product and not (method == "int8" and has_experts)


def matrices_of(
    quantization: QuantizationConfig, stored: Mapping[str, TensorInfo]
) -> Iterator[Weight]:
    """Yield each stored quantised matrix, by its name in an unquantised file.

    Stacked experts are `[E, O, I]`, although unquantised ones are stored transposed.
    """
    for weight_format in quantization.weight_formats:
        (main, kinds), is_stacked = weight_format.main_tensor, weight_format.is_stacked
        axes, joint = (4, "_") if is_stacked else (2, ".")
        for key, tensor in stored.items():
            is_main = key.endswith(joint + main) and tensor.kind in kinds
            if not is_main or len(tensor.shape) != axes:
                continue
            module, shape = key.removesuffix(joint + main), weight_format.matrix_shape(tensor.shape)
            if is_stacked:
                turned = shape[0], shape[2], shape[1]
                part = Part(module, turned, lambda weight: weight.transpose(1, 2))
                yield Weight(module, shape, (part,))
            else:
                yield whole(module + WEIGHT, module + WEIGHT, *shape)


def names_of(quantization: QuantizationConfig | None, wanted: Sequence[Weight]) -> list[str]:
    """Return the names of all tensors that quantised matrices may have."""
    names: list[str] = []
    for weight_format in () if quantization is None else quantization.weight_formats:
        for part in (part for weight in wanted for part in weight.parts):
            if _is_matrix(weight_format, part):
                for has in (_has_all, _has_none):
                    tensor_specs = weight_format.tensor_specs(_shape(part), has)
                    names += [_prefix(part) + own for own in tensor_specs]
    return names


def _has_all(_: str) -> bool:
    return True


def _has_none(_: str) -> bool:
    return False


def without_empty_biases(
    quantization: QuantizationConfig | None,
    wanted: Sequence[Weight],
    stored: Mapping[str, TensorInfoT],
    fill: Fill,
) -> dict[str, TensorInfoT]:
    """Return the stored tensors except biases of zeros, which some tools add to every matrix.

    Only those that the network has no place for are left out.
    """
    if quantization is None or quantization.is_made_at_load:
        return dict(stored)
    keys = {part.key for weight in wanted for part in weight.parts}
    matrices = [part for weight in wanted for part in weight.parts if part.key.endswith(WEIGHT)]
    biases = {f"{_prefix(part)}bias" for part in matrices} & stored.keys() - keys
    empty = {
        key
        for key in sorted(biases)
        if stored[key].kind in FLOATS and not fill([whole(key, key, *stored[key].shape)])[key].any()
    }
    return {key: tensor for key, tensor in stored.items() if key not in empty}


def _quantised_part(
    quantization: QuantizationConfig, part: Part, stored: Mapping[str, TensorInfo]
) -> QuantisedPart | None:
    """Return the tensors of a part that is quantised; None if it is not."""
    prefix = _prefix(part)
    for weight_format in quantization.weight_formats:
        main_tensor, kinds = weight_format.main_tensor
        main = stored.get(prefix + main_tensor)
        if not _is_matrix(weight_format, part) or main is None or main.kind not in kinds:
            continue
        tensor_specs = {}
        lie = weight_format.tensor_specs(_shape(part), lambda name: prefix + name in stored)
        for name, piece in lie.items():
            key = prefix + name
            there = stored[key].shape if key in stored else None
            shape = there if there in piece.shapes else piece.shapes[0]
            tensor_specs[name] = whole(key, key, *shape, kinds=piece.kinds)
        return QuantisedPart(weight_format, tensor_specs)
    return None


def _by_experts(weight: Weight, stored: QuantisedPart) -> tuple[Weight, tuple[QuantisedPart, ...]]:
    """Return a weight of stacked experts as one part per expert, with the tensors to read.

    Reading one by one limits the memory for packing to one expert.
    """
    (stacked,), (weight_format, tensor_specs) = weight.parts, stored
    experts, columns, rows = (*stacked.taken, *map(range, stacked.shape[len(stacked.taken) :]))
    assert columns.start % MXFP4_GROUP == 0
    groups = range(columns.start // MXFP4_GROUP, -(-columns.stop // MXFP4_GROUP))
    parts, read = [], []
    for expert in experts:
        taken = (range(expert, expert + 1), rows, groups)
        own = {
            key: replace(
                spec,
                shape=(1, len(rows), len(groups), *spec.shape[3:]),
                parts=(replace(spec.parts[0], taken=taken),),
            )
            for key, spec in tensor_specs.items()
        }
        read.append(QuantisedPart(weight_format, own))
        place = partial(_place_of_expert, stacked.place, expert)
        parts.append(replace(stacked, shape=(len(rows), len(columns)), place=place, taken=()))
    return replace(weight, parts=tuple(parts)), tuple(read)


def _place_of_expert(place: Place, expert: int, weight: Tensor) -> Tensor:
    """Return the rows `[…, any]` of an expert; `place` returns them transposed."""
    return place(weight)[expert].movedim(0, -1)


def _is_matrix(weight_format: WeightFormat, part: Part) -> bool:
    """Return whether a format has a part; unquantised stacked experts are stored transposed."""
    if weight_format.is_stacked:
        return len(part.shape) == STACKED_AXES
    return part.key.endswith(WEIGHT) and len(part.shape) == 2


def _shape(part: Part) -> tuple[int, ...]:
    """Return the shape of a part's matrix `[O, I]`, or of its matrices `[E, O, I]`."""
    if len(part.shape) < STACKED_AXES:
        return part.shape
    experts, inputs, outputs = part.shape
    return experts, outputs, inputs


def _prefix(part: Part) -> str:
    """Return the prefix of the names of a part's tensors."""
    return part.key.removesuffix("weight") if part.key.endswith(WEIGHT) else f"{part.key}_"


def _read_ranges(part: Part) -> tuple[range, range]:
    """Return the rows and columns of a matrix that are read."""
    rows, columns = (*part.taken, *map(range, part.shape[len(part.taken) :]))
    return rows, columns


def _with_whole_rows(weight: Weight) -> tuple[Weight, range | None]:
    """Return a weight with all of its columns, for the row scales, and the columns to keep."""
    first = weight.parts[0]
    last = len(first.taken) - 1  # the axis of inner numbers in a down projection
    joins = weight.role.endswith(("o_proj", "down_proj"))
    if not joins or last < 1 or len(first.taken[last]) == first.shape[last]:
        return weight, None
    parts = tuple(
        replace(part, taken=(*part.taken[:last], range(part.shape[last]))) for part in weight.parts
    )
    shape = (*weight.shape[:-1], first.shape[last])
    return replace(weight, shape=shape, parts=parts), first.taken[last]


def _columns_of(whole: Quantised, columns: range | None) -> Quantised:
    """Return adjacent columns of a weight with one scale per row; None is all."""
    if columns is None:
        return whole
    numbers = whole.numbers[..., columns.start : columns.stop].contiguous()
    return replace(whole, numbers=numbers, inputs=len(columns), group=len(columns))


def _alone(part: Part) -> Weight:
    """Return the part of a tensor that is read, as a separate weight."""
    itself = replace(part, place=lambda weight: weight)
    return Weight(part.key, part.read_shape, (itself,))
