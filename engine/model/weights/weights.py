"""Weights from safetensors: one stored tensor after another, each directly to its place.

Files are read, not mapped: apart from the weights, only one tensor is resident, and only if its
dtype or order changes on the way. Copies to another device use two small buffers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import FileIO
from math import prod
from pathlib import Path
from struct import unpack
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import ModelRefused
from ...kernels.communicator import Shard
from ...kernels.quantised import Matrix, as_tensor
from ..config.architecture import Architecture, WeightNames
from ..config.hf_config import UnsupportedConfig
from .checkpoint import (
    FLOATS,
    Checkpoint,
    LoadingInfo,
    check_count,
    check_kind,
    check_tensors,
    some,
)
from .quantised.loading import (
    DERIVED,
    IGNORED,
    names_of,
    plan_loading,
    without_empty_biases,
)
from .sanity import check_numbers
from .staging import Staging, staging_for
from .weight_map import weights_of
from .weight_parts import WHOLE, Weight, table

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
# Prefixes of the text model in a multimodal checkpoint, when the text model is served alone.
TEXT_OF_WHOLE = {
    r"^language_model\.(?=model\.|lm_head\.)": "",
    r"^model\.language_model\.": "model.",
    r"^language_model\.(?!model\.|lm_head\.)": "model.",
}
BASE = "model"
_AS_STORED: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: its name in a text model, its dtype in safetensors, its first byte."""

    name: str
    kind: str
    shape: tuple[int, ...]
    file: Path
    start: int


def read_weights(
    checkpoint: Checkpoint,
    architecture: Architecture,
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_multimodal: bool = False,
    num_layers: int | None = None,
    has_head: bool = True,
    more: Sequence[Weight] = (),
    shard: Shard = WHOLE,
    zeros: list[str] | None = None,
) -> dict[str, Matrix]:
    """Return a rank's weights of a decoder by role; `ModelRefused` names problems.

    `is_multimodal` means that the files contain more than text; `num_layers` limits the layers.
    Without `has_head` the weights of logits are left out; `more` are read with the others. `zeros`
    is described in `filled`.
    """
    architecture = as_stored(checkpoint, architecture)
    wanted = [*weights_of(architecture, has_head=has_head), *more]
    stored = find_layout(
        checkpoint, architecture, wanted, is_multimodal=is_multimodal, has_head=has_head
    )
    head = architecture.names.lm_head
    if has_head and architecture.tie_word_embeddings and f"{head}.weight" in stored:
        # transformers, too, prefers the stored head to the config's flag.
        more = [*more, table("lm_head", head, architecture, shard)]

    first = replace(architecture, blocks=architecture.blocks[:num_layers])
    own = [*weights_of(first, has_head=has_head, shard=shard), *more]
    weights = read_stored(checkpoint, own, stored, dtype, device, zeros=zeros)
    tied = weights.get("lm_head") if architecture.tie_word_embeddings else None
    if isinstance(tied, Tensor) and torch.equal(tied, as_tensor(weights["embed_tokens"])):
        del weights["lm_head"]
    return weights


def read_stored(
    checkpoint: Checkpoint,
    wanted: Sequence[Weight],
    stored: Mapping[str, StoredTensor],
    dtype: torch.dtype,
    device: torch.device,
    *,
    zeros: list[str] | None = None,
) -> dict[str, Matrix]:
    """Return weights by role from the result of `find_layout`.

    `zeros` is described in `fill_weights`.
    """
    staging = staging_for(device)  # shared: each part of quantised weights is filled separately

    def fill(several: Sequence[Weight]) -> dict[str, Tensor]:
        return fill_weights(
            checkpoint.name, several, stored, dtype, device, staging=staging, zeros=zeros
        )

    plan = plan_loading(checkpoint.name, checkpoint.quantization, wanted, stored)
    return dict(plan.read(fill, dtype, device))


def find_layout(
    checkpoint: Checkpoint,
    architecture: Architecture,
    wanted: Sequence[Weight],
    *,
    is_multimodal: bool = False,
    has_head: bool = True,
) -> dict[str, StoredTensor]:
    """Return the stored tensors of a decoder's weights by their keys, from the files' headers.

    `ModelRefused` names a tensor that is missing, has another shape, or has no place in it.
    """
    quantization, called = checkpoint.quantization, architecture.names
    head, embedding = f"{called.lm_head}.weight", f"{called.embed_tokens}.weight"
    stored = find_stored(
        checkpoint.files,
        wanted,
        head,
        *names_of(quantization, wanted),
        is_multimodal=is_multimodal,
        base=called.base,
    )
    first = len(architecture.blocks)
    behind = tuple(f"{called.layers}.{first + i}." for i in range(architecture.num_mtp_layers))
    mtp = (*behind, *called.mtp)
    stored = {key: tensor for key, tensor in stored.items() if not key.startswith(mtp)}
    if architecture.tie_word_embeddings and embedding not in stored and head in stored:
        stored[embedding] = stored.pop(head)
    if has_head and architecture.tie_word_embeddings and head in stored:
        wanted = [*wanted, table("lm_head", called.lm_head, architecture)]
    needed = plan_loading(checkpoint.name, quantization, wanted, stored).tensors()
    lacking = missing_from(stored, needed)
    if any(block.experts for block in architecture.blocks) and lacking & _keys(wanted):
        check_count(checkpoint, _count(needed))
        raise UnsupportedConfig(
            f"its weights lack {some(sorted(lacking))}: its experts may be stored in an "
            "unsupported layout"
        )

    def fill(several: Sequence[Weight]) -> dict[str, Tensor]:
        dtype, device = torch.float32, torch.device("cpu")
        return fill_weights(checkpoint.name, several, stored, dtype, device)

    stored = without_empty_biases(quantization, wanted, stored, fill)
    check_stored(
        checkpoint,
        architecture.class_name,
        needed,
        stored,
        is_multimodal=is_multimodal,
        base=called.base,
        ignored=DERIVED if quantization is None else IGNORED,
    )
    return stored


def as_stored(checkpoint: Checkpoint, architecture: Architecture) -> Architecture:
    """Return an architecture by the names of its files, if stacked experts are stored one by one.

    transformers saves models in this form that were published stacked.
    """
    names = architecture.names
    if names.stacked_experts != "rows":
        return architecture
    tensors = (tensor.name for file in checkpoint.files for tensor in _tensors(file, {}))
    if not any(".experts.0." in name for name in tensors):
        return architecture
    single = replace(names, stacked_experts=None, expert=WeightNames().expert)
    return replace(architecture, names=single)


def find_stored(
    files: Iterable[Path],
    wanted: Iterable[Weight],
    *more: str,
    is_multimodal: bool = False,
    base: str = BASE,
    renamed: Mapping[str, str] = _AS_STORED,
) -> dict[str, StoredTensor]:
    """Return the tensors in the files by the keys of a layout, or of `more`.

    `base` is the prefix of most keys. `renamed` are patterns of names, with their replacements.
    """
    keys = _keys(wanted).union(more)
    tensors = {}
    for file in files:
        for tensor in _tensors(file, {**renamed, **(TEXT_OF_WHOLE if is_multimodal else {})}):
            # A bare base model's weights have the same names without its prefix.
            prefixed = f"{base}.{tensor.name}"
            is_bare = tensor.name not in keys and prefixed in keys
            tensors[prefixed if is_bare else tensor.name] = tensor
    return tensors


def fill_weights(
    name: str,
    wanted: Sequence[Weight],
    stored: Mapping[str, StoredTensor],
    dtype: torch.dtype,
    device: torch.device,
    *,
    staging: Staging | None = None,
    zeros: list[str] | None = None,
) -> dict[str, Tensor]:
    """Return weights by role; parts without a stored tensor are zero.

    `staging` brings them to the device, if there is a stager already. `zeros` receives the keys of
    matrices that contain only 0. Numbers that no trained model has are refused.
    """
    weights = {weight.role: _room(weight, stored, dtype, device) for weight in wanted}
    places = [
        (stored[part.key], part, part.place(weights[weight.role]))
        for weight in wanted
        for part in weight.parts
    ]
    staging = staging or staging_for(device)
    for tensor, part, place in sorted(places, key=lambda one: (one[0].file, one[0].start)):
        _read(name, tensor, part.taken, place, staging)
    empty = check_numbers(name, [(part.key, place) for _, part, place in places])
    if zeros is not None:
        zeros += empty
    return weights


def missing_from(stored: Mapping[str, StoredTensor], wanted: Iterable[Weight]) -> set[str]:
    """Return the keys of a layout without a stored tensor."""
    return _keys(wanted) - stored.keys()


def _keys(wanted: Iterable[Weight]) -> set[str]:
    return {part.key for weight in wanted for part in weight.parts}


def _room(
    weight: Weight, stored: Mapping[str, StoredTensor], dtype: torch.dtype, device: torch.device
) -> Tensor:
    if weight.kinds is not None:
        dtype = DTYPES[stored[weight.parts[0].key].kind]
    is_whole = sum(part.count for part in weight.parts) == prod(weight.shape)
    make = torch.empty if is_whole else torch.zeros
    return make(weight.shape, dtype=dtype, device=device)


def count_stored(checkpoint: Checkpoint) -> int:
    """Return the number of elements in the files, by their headers."""
    return sum(prod(tensor.shape) for file in checkpoint.files for tensor in _tensors(file, {}))


def _count(wanted: Iterable[Weight]) -> int:
    shapes = {part.key: part.shape for weight in wanted for part in weight.parts}
    return sum(map(prod, shapes.values()))


def _tensors(file: Path, renamed: Mapping[str, str]) -> list[StoredTensor]:
    """Return the tensors of a checked file, from its JSON header."""
    with FileIO(file) as opened:
        (length,) = unpack("<Q", opened.read(8))
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    tensors = []
    for key, entry in header.items():
        name = key
        for pattern, instead in renamed.items():
            name = re.sub(pattern, instead, name)
        start = 8 + length + entry["data_offsets"][0]
        tensors.append(StoredTensor(name, entry["dtype"], tuple(entry["shape"]), file, start))
    return tensors


def check_stored(
    checkpoint: Checkpoint,
    title: str,
    wanted: Sequence[Weight],
    stored: Mapping[str, StoredTensor],
    *,
    is_multimodal: bool = False,
    base: str = BASE,
    ignored: re.Pattern[str] = DERIVED,
) -> None:
    """Refuse weights that lack tensors of a network, or have surplus ones.

    Tensors in `ignored` are not needed; `base` is the prefix of most keys.
    """
    check_count(checkpoint, _count(wanted))
    parts = {part.key: part for weight in wanted for part in weight.parts}
    modules = {""}
    for key in parts:
        path = key.split(".")[:-1]
        modules.update(".".join(path[:depth]) for depth in range(1, len(path) + 1))
    report = LoadingInfo(
        missing=missing_from(stored, wanted),
        unexpected=[
            tensor.name
            for key, tensor in stored.items()
            if key not in parts and not ignored.search(key)
        ],
        mismatched=[
            (key, stored[key].shape, part.shape)
            for key, part in parts.items()
            if key in stored and stored[key].shape != part.shape
        ],
    )
    check_tensors(checkpoint.name, title, modules, base, report, is_multimodal=is_multimodal)
    for weight in wanted:
        for part in weight.parts:
            check_kind(checkpoint.name, part.key, stored[part.key].kind, weight.kinds or FLOATS)


def _read(
    name: str, tensor: StoredTensor, taken: Sequence[range], place: Tensor, staging: Staging | None
) -> None:
    """Copy the read part of a stored tensor to its place, directly if it has the same layout."""
    dtype = DTYPES[tensor.kind]
    is_direct = place.dtype == dtype and place.is_contiguous()
    target = place if is_direct else torch.empty(place.shape, dtype=dtype, device=place.device)
    with FileIO(tensor.file) as opened:
        reading = _Reading(name, opened, tensor, taken)
        if staging is None:
            numbers: Any = target.view(-1).view(torch.uint8).numpy()
            reading.fill(memoryview(numbers))
        else:
            staging.send(reading.fill, target)
    if not is_direct:
        place.copy_(target)


class _Reading:
    """The bytes of the read part of a tensor in a file, one contiguous run after another."""

    def __init__(
        self, name: str, opened: FileIO, tensor: StoredTensor, taken: Sequence[range]
    ) -> None:
        self._name = name
        self._opened = opened
        self._tensor = tensor
        starts, self._length = _runs(tensor.shape, taken, DTYPES[tensor.kind].itemsize)
        self._starts = iter(starts.tolist())
        self._left = 0  # bytes left in the current run

    def fill(self, buffer: memoryview) -> None:
        """Read as many bytes as the buffer has room for."""
        while buffer:
            if not self._left:
                self._opened.seek(self._tensor.start + next(self._starts))
                self._left = self._length
            count = self._opened.readinto(buffer[: self._left])
            if not count:
                cut_off = f"{self._tensor.file.name} was truncated while it was read."
                raise ModelRefused(f"{self._name}: {cut_off}")
            buffer, self._left = buffer[count:], self._left - count


def _runs(
    shape: Sequence[int], taken: Sequence[range], itemsize: int
) -> tuple[NDArray[np.int64], int]:
    """Return the start of each contiguous run of bytes in a stored tensor, and their length.

    The read parts of its first axes are contiguous.
    """
    axes = [*taken, *map(range, shape[len(taken) :])]
    widths = [itemsize * prod(shape[axis + 1 :]) for axis in range(len(shape))]
    cut = [axis for axis, own in enumerate(axes) if len(own) < shape[axis]]
    last = max(cut, default=0)  # after it everything is read
    starts = np.zeros(1, np.int64)
    for own, width in zip(axes[:last], widths[:last], strict=True):
        starts = (starts[:, None] + np.asarray(own, np.int64) * width).ravel()
    if not axes:
        return starts, itemsize
    return starts + axes[last].start * widths[last], len(axes[last]) * widths[last]
