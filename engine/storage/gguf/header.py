"""Header of a GGUF file: its metadata and the positions of its tensors.

The `gguf` package's own reader takes seconds for a large vocabulary and fails with tracebacks on a
truncated file. The layout is that of the GGUF specification, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...errors import ModelRefused

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_ALIGNMENT: Final = 32
_MAX_ITEMS: Final = 2**26
_MAX_DIMENSIONS: Final = 4
_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor of a GGUF file: its type's number in ggml, and its first byte in the file.

    `shape` is in the order of safetensors: rows first.
    """

    name: str
    kind: int
    shape: tuple[int, ...]
    start: int

    @property
    def count(self) -> int:
        """Return the number of its values."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """The metadata of a GGUF file and its tensors by name."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        """Return the file's architecture, or an empty string."""
        return str(self.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value of the architecture by its key without the architecture's name."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def read_header(path: Path) -> GGUFHeader:
    """Return the header of a GGUF file; raise `ModelRefused` for an invalid or unsupported file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = _Reader(file, size).header(path)
    except (EOFError, RecursionError, UnicodeDecodeError) as exc:
        raise ModelRefused(f"{path} is truncated or damaged: copy or download it again.") from exc
    except OSError as exc:
        raise ModelRefused(f"{path} cannot be read: {exc.strerror or exc}.") from exc
    parts = header.metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise ModelRefused(
            f"{path} is one of {parts} parts of a split GGUF, which is not supported: merge the "
            "parts with `llama-gguf-split --merge`."
        )
    return header


class _Reader:
    """Reads the values of a header one after another."""

    def __init__(self, file: BufferedReader, size: int) -> None:
        self._file = file
        self._size = size

    def header(self, path: Path) -> GGUFHeader:
        """Return the whole header."""
        if self._file.read(4) != _MAGIC:
            raise ModelRefused(f"{path} is not a GGUF file: it does not start with {_MAGIC!r}.")
        (version,) = self._unpack("<I")
        if version not in _VERSIONS:
            swapped = struct.unpack(">I", struct.pack("<I", version))[0] in _VERSIONS
            variant = "big-endian" if swapped else f"version {version} of the format"
            raise ModelRefused(f"{path} is {variant}, which is not supported: convert it again.")
        num_tensors, num_values = self._unpack("<QQ")
        if max(num_tensors, num_values) > _MAX_ITEMS:
            raise EOFError
        metadata = {}
        for _ in range(num_values):
            key = self._string()
            (kind,) = self._unpack("<I")
            metadata[key] = self._value(kind)
        described = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise EOFError
        first = -(-self._file.tell() // alignment) * alignment
        tensors = {
            name: GGUFTensor(name, kind, shape, first + offset)
            for name, kind, shape, offset in described
        }
        return GGUFHeader(path, metadata, tensors)

    def _read(self, count: int) -> bytes:
        if count > self._size:
            raise EOFError
        data = self._file.read(count)
        if len(data) < count:
            raise EOFError
        return data

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self._read(struct.calcsize(layout)))

    def _string(self) -> str:
        (length,) = self._unpack("<Q")
        return self._read(length).decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalars(kind, 1)[0]
        item_kind, count = self._unpack("<IQ")
        if count > _MAX_ITEMS:
            raise EOFError
        if item_kind in _SCALARS:
            return self._scalars(item_kind, count)
        return [self._value(item_kind) for _ in range(count)]

    def _scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise EOFError
        dtype = np.dtype(_SCALARS[kind])
        values: list[Any] = np.frombuffer(self._read(count * dtype.itemsize), dtype).tolist()
        return values

    def _tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._string()
        (num_dimensions,) = self._unpack("<I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise EOFError
        shape = self._unpack(f"<{num_dimensions}Q")
        kind, offset = self._unpack("<IQ")
        return name, kind, tuple(reversed(shape)), offset
