"""Line index: 64 bytes per line of a file, and the prefixes of its prompts on disk.

Prompts are compared as the JSON that a template renders: if it is equal, so are the tokens. The
index needs neither tokenisation nor the model.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import IO, Any, Final
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from ..console.errors import BadInput
from .body_form import BodyForm

PREFIX_BYTES: Final = tuple(128 << level for level in range(8))
"""Lengths of the prompt prefixes for which fingerprints are stored."""

_SHORTEST_BYTES: Final = PREFIX_BYTES[0]
MAX_KEY_BYTES: Final = PREFIX_BYTES[-1]

_RECORD, _SPAN = Struct("<qIIIiq8I"), Struct("<qII")
_DTYPE = np.dtype(
    [
        ("start", "<i8"),
        ("num_bytes", "<u4"),
        ("number", "<u4"),
        ("prompt_bytes", "<u4"),
        ("max_tokens", "<i4"),
        ("body_hash", "<i8"),
        ("prefixes", "<u4", len(PREFIX_BYTES)),
    ]
)
_MAX_COUNT = 2**31 - 1
_BLOCK_BYTES: Final = 2**18
_BYTES_BETWEEN_KEYS: Final = 2**12
"""Keys that are nearer on average are read in blocks."""

UNKNOWN: Final = -1
"""The `max_tokens` of a line without a limit, which may fill the context."""


class LineIndex:
    """Index of the lines of one file, in their order.

    The arrays of `records` are `start`, `num_bytes` and `number` (the line's position and number
    in its file), `prompt_bytes` (of JSON), `max_tokens` (the sum over its answers), `body_hash`
    (0 if repeats of the body get different results) and `prefixes`.
    """

    def __init__(self, tmp_dir: Path | None = None) -> None:
        self._records = bytearray()
        self._tmp_dir = tmp_dir
        self._keys = _temporary_file(tmp_dir)

    def __len__(self) -> int:
        return len(self._records) // _RECORD.size

    def add(
        self,
        start: int,
        num_bytes: int,
        number: int,
        body: Mapping[str, Any] | None = None,
        form: BodyForm | None = None,
    ) -> None:
        """Add the next line; `body` is None if it is not a request, `form` its known form."""
        if body is None:
            self._records += _RECORD.pack(start, num_bytes, number, 0, 0, 0, *_NO_PREFIXES)
            return
        self.add_described(start, num_bytes, number, describe(body, form))

    def add_described(
        self, start: int, num_bytes: int, number: int, described: tuple[bytes, int, int]
    ) -> None:
        """Add the next line, with the result of `describe` for its body."""
        key, max_tokens, body_hash = described
        length, begin = len(key), _SHORTEST_BYTES
        prefixes = [crc := crc32(key[:begin])]
        while begin < length and begin < MAX_KEY_BYTES:
            prefixes.append(crc := crc32(key[begin : 2 * begin], crc))
            begin *= 2
        # Longer prefixes are the whole prompt, too.
        prefixes += [crc] * (len(PREFIX_BYTES) - len(prefixes))
        try:
            self._keys.write(key[:MAX_KEY_BYTES])
        except OSError as exc:
            raise self._failure(exc) from exc
        self._records += _RECORD.pack(
            start, num_bytes, number, length, max_tokens, body_hash, *prefixes
        )

    def span(self, place: int) -> tuple[int, int, int]:
        """Return `start`, `num_bytes` and `number` of the line at a place."""
        span: tuple[int, int, int] = _SPAN.unpack_from(self._records, place * _RECORD.size)
        return span

    @property
    def records(self) -> NDArray[Any]:
        """Return a structured array, one record per line; while it exists, none can be added."""
        return np.frombuffer(self._records, _DTYPE)

    def keys(self, offsets: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.bytes_]:
        """Return prompts' bytes at offsets in the key file, padded to the longest."""
        try:
            self._keys.flush()
        except OSError as exc:
            raise self._failure(exc) from exc
        fd, width = self._keys.fileno(), max(1, int(lengths.max(initial=1)))
        keys = np.zeros(len(offsets), f"S{width}")
        room = memoryview(keys.view(np.uint8).data)
        order = np.argsort(offsets, kind="stable")
        starts = (order * width).tolist()
        offsets, lengths = offsets[order], lengths[order]
        is_dense = len(offsets) and offsets[-1] - offsets[0] < _BYTES_BETWEEN_KEYS * len(offsets)
        size, block, first, end = _BLOCK_BYTES if is_dense else 0, b"", 0, 0
        for start, offset, length in zip(starts, offsets.tolist(), lengths.tolist(), strict=True):
            if offset + length > end:
                block, first = os.pread(fd, max(length, size), offset), offset
                end = first + len(block)
            room[start : start + length] = block[offset - first : offset - first + length]
        return keys

    def close(self) -> None:
        """Remove the key file."""
        with suppress(OSError):  # it tries to write the buffer again
            self._keys.close()

    def _failure(self, exc: OSError) -> BadInput:
        folder = self._tmp_dir or tempfile.gettempdir()
        return BadInput(
            f"the prompts cannot be indexed in {folder} ({exc.strerror}): pass --output-tmp-dir to "
            "use another folder"
        )


def _temporary_file(folder: Path | None) -> IO[bytes]:
    return tempfile.TemporaryFile(dir=folder, buffering=2**18)


_NO_PREFIXES = (0,) * len(PREFIX_BYTES)


def describe(body: Mapping[str, Any], form: BodyForm | None = None) -> tuple[bytes, int, int]:
    """Return a body's prompt as bytes, the limit of its answers' tokens, and its hash.

    Lines with the same deterministic result share the hash, which is 0 for sampled results.
    """
    form = BodyForm(body) if form is None else form
    key, most = form.prompt_key(body), form.max_tokens(body)
    return key, UNKNOWN if most is None else min(most, _MAX_COUNT), form.hash_of(key)
