"""Tensors of a GGUF file: dequantized by the `gguf` package, a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from io import FileIO
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...errors import ModelRefused
from .header import GGUFHeader, GGUFTensor

_F32: Final = 0
_F16: Final = 1
_BF16: Final = 30
FLOATS: Final = {_F32: "F32", _F16: "F16", _BF16: "BF16"}
"""Types that are stored as they are, by their numbers in ggml, as safetensors call them."""

_CHUNK_NUMBERS: Final = 2**24


def check_types(header: GGUFHeader, size: int) -> None:
    """Refuse tensors of types that the `gguf` package cannot read, and those behind the end."""
    for tensor in header.tensors.values():
        if tensor.start + num_bytes(header, tensor) > size:
            raise ModelRefused(
                f"{header.path} is truncated: {tensor.name} is incomplete; copy or download it "
                "again."
            )


def num_bytes(header: GGUFHeader, tensor: GGUFTensor) -> int:
    """Return how many bytes a tensor takes in the file; `ModelRefused` for an unreadable type."""
    return prod(_row_shape(header, tensor))


def _row_shape(header: GGUFHeader, tensor: GGUFTensor) -> tuple[int, ...]:
    """Return the shape of a tensor in bytes: all rows, and the bytes of a row."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        kind = GGMLQuantizationType(tensor.kind)
        block, size = GGML_QUANT_SIZES[kind]
        if tensor.kind not in FLOATS:
            dequantize(np.zeros((1, size), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError) as exc:
        name = getattr(locals().get("kind"), "name", tensor.kind)
        raise ModelRefused(
            f"{header.path}: {tensor.name} has the type {name}, which the gguf package cannot "
            "read: use a file of another quantization."
        ) from exc
    *rows, width = tensor.shape or (1,)
    if width % block:
        raise ModelRefused(f"{header.path} is damaged: {tensor.name} has rows of {width} numbers.")
    return prod(rows), width // block * size


def read_rows(
    header: GGUFHeader,
    file: FileIO,
    tensor: GGUFTensor,
    *,
    expert: int | None = None,
    permuted_heads: int = 0,
) -> Iterator[NDArray[Any]]:
    """Yield the rows of a tensor, in parts: as they are stored, or dequantized to fp32.

    A part of BF16 is of 16-bit integers. Rows of heads are put back into transformers' order.
    """
    rows, width = _row_shape(header, tensor)
    start = tensor.start
    if expert is not None:
        rows //= tensor.shape[0]
        start += expert * rows * width
    file.seek(start)
    step = rows if permuted_heads else max(1, _CHUNK_NUMBERS // tensor.shape[-1])
    for first in range(0, rows, step):
        shape = (min(step, rows - first), width)
        stored = np.fromfile(file, np.uint8, prod(shape))
        if stored.size < prod(shape):
            raise ModelRefused(f"{header.path} was cut off while it was read.")
        stored = stored.reshape(shape)
        if permuted_heads:
            stored = stored.reshape(tensor.shape[0], -1)  # a bias is one row of numbers
            order = np.arange(len(stored)).reshape(permuted_heads, -1, 2)
            stored = stored[order.swapaxes(1, 2).ravel()]
        yield _decode(stored, tensor.kind)


def _decode(rows: NDArray[np.uint8], kind: int) -> NDArray[Any]:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    if kind == _F32:
        return rows.view(np.float32)
    if kind == _F16:
        return rows.view(np.float16)
    if kind == _BF16:
        return rows.view(np.uint16)
    decoded: NDArray[Any] = dequantize(rows, GGMLQuantizationType(kind))
    return decoded


def read_floats(header: GGUFHeader, tensor: GGUFTensor) -> NDArray[np.float32]:
    """Return the numbers of a small tensor of type F32."""
    if tensor.kind != _F32:
        raise ModelRefused(f"{header.path}: {tensor.name} is not of type F32.")
    with header.path.open("rb") as file:
        file.seek(tensor.start)
        data = file.read(4 * tensor.count)
    if len(data) < 4 * tensor.count:
        raise ModelRefused(f"{header.path} is truncated: copy or download it again.")
    return np.frombuffer(data, np.float32)
