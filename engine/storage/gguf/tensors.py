"""Tensors of a GGUF file: dequantized with the `gguf` package, a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from functools import cache, partial
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
"""Names in safetensors of the types that are stored unchanged, by their numbers in ggml."""

_DTYPES: Final = {_F32: np.float32, _F16: np.float16, _BF16: np.uint16}
_CHUNK_NUMBERS: Final = 2**21
"""Numbers that a thread processes at a time."""


def check_types(header: GGUFHeader, size: int) -> None:
    """Reject tensors of types that the `gguf` package cannot read, and truncated ones."""
    for tensor in header.tensors.values():
        if tensor.start + num_bytes(header, tensor) > size:
            raise ModelRefused(
                f"{header.path} is truncated: {tensor.name} is incomplete; copy or download it "
                "again."
            )


def num_bytes(header: GGUFHeader, tensor: GGUFTensor) -> int:
    """Return the size of a tensor in the file; raise `ModelRefused` for an unreadable type."""
    return prod(_row_shape(header, tensor))


def _row_shape(header: GGUFHeader, tensor: GGUFTensor) -> tuple[int, int]:
    """Return the shape of a tensor in bytes: all rows, and the bytes of a row."""
    sizes = _block_sizes(tensor.kind)
    if isinstance(sizes, str):
        raise ModelRefused(
            f"{header.path}: {tensor.name} has type {sizes}, which the gguf package cannot "
            "read: use a file with another quantization."
        )
    block, size = sizes
    *rows, width = tensor.shape or (1,)
    if width % block:
        raise ModelRefused(f"{header.path} is damaged: {tensor.name} has rows of {width} values.")
    return prod(rows), width // block * size


@cache
def _block_sizes(kind: int) -> tuple[int, int] | str:
    """Return the numbers and bytes of a type's block; its name if it cannot be read."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        type_ = GGMLQuantizationType(kind)
    except ValueError:
        return str(kind)
    block, size = GGML_QUANT_SIZES[type_]
    if kind not in FLOATS:
        try:
            dequantize(np.zeros((1, size), np.uint8), type_)
        except NotImplementedError:
            return type_.name
    return block, size


def read_parts(
    header: GGUFHeader,
    file: FileIO,
    tensor: GGUFTensor,
    pool: Executor,
    num_threads: int,
    *,
    expert: int | None = None,
    permuted_heads: int = 0,
    offset: float = 0.0,
) -> Iterator[NDArray[Any]]:
    """Yield a tensor part by part: bits of bf16 for a quantized one, else the stored values.

    Rows of heads are restored to transformers' order, and `offset` is subtracted.
    """
    rows, width = _row_shape(header, tensor)
    start = tensor.start
    if expert is not None:
        rows //= tensor.shape[0]
        start += expert * rows * width
    file.seek(start)
    step = rows if permuted_heads else max(1, _CHUNK_NUMBERS * num_threads // tensor.shape[-1])
    for first in range(0, rows, step):
        shape = (min(step, rows - first), width)
        stored = np.fromfile(file, np.uint8, prod(shape))
        if stored.size < prod(shape):
            raise ModelRefused(f"{header.path} was truncated while being read.")
        stored = stored.reshape(shape)
        if permuted_heads:
            stored = stored.reshape(tensor.shape[0], -1)  # a bias is one row of values
            order = np.arange(len(stored)).reshape(permuted_heads, -1, 2)
            stored = stored[order.swapaxes(1, 2).ravel()]
        decode = partial(_decode, kind=tensor.kind, offset=offset)
        yield from pool.map(decode, np.array_split(stored, min(num_threads, len(stored))))


def _decode(rows: NDArray[np.uint8], kind: int, offset: float) -> NDArray[Any]:
    """Return rows as numbers of their type, bf16 as bits."""
    import torch
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    if kind in FLOATS:
        numbers: NDArray[Any] = rows.view(_DTYPES[kind])
        return numbers - numbers.dtype.type(offset) if offset else numbers
    # As one row: the package works on 16 rows at a time, which are few values in a small model.
    numbers = dequantize(rows.reshape(1, -1), GGMLQuantizationType(kind)) - np.float32(offset)
    bits: NDArray[Any] = torch.from_numpy(numbers).to(torch.bfloat16).view(torch.int16).numpy()
    return bits


def check_is_f32(header: GGUFHeader, tensor: GGUFTensor) -> None:
    """Reject a file that does not store this tensor as F32, as llama.cpp does."""
    if tensor.kind != _F32:
        raise ModelRefused(
            f"{header.path}: {tensor.name} is not stored as F32, which is not supported: convert "
            "the model again with llama.cpp."
        )


def read_floats(header: GGUFHeader, tensor: GGUFTensor) -> NDArray[np.float32]:
    """Return the numbers of a small tensor of type F32."""
    check_is_f32(header, tensor)
    with header.path.open("rb") as file:
        file.seek(tensor.start)
        data = file.read(4 * tensor.count)
    if len(data) < 4 * tensor.count:
        raise ModelRefused(f"{header.path} is truncated: copy or download it again.")
    return np.frombuffer(data, np.float32)
