"""Line index: 64 bytes for each line of a file, and the beginnings of its prompts on disk.

Prompts are compared as JSON of what a template renders: where that is alike, so are the tokens.
Nothing is tokenised here, and nothing needs the model.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from struct import Struct
from typing import IO, Any, Final
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from pydantic_core import to_json

from tidemill.protocol.output_limit import max_output_tokens
from tidemill.protocol.prompt_key import PROMPTS, is_determined, prompt_key

PREFIX_BYTES: Final = tuple(128 << level for level in range(8))
"""Lengths of the prefixes of a prompt that have a fingerprint each."""

MAX_KEY_BYTES: Final = PREFIX_BYTES[-1]

_RECORD, _SPAN = Struct("<qIIIiQ8I"), Struct("<qII")
_DTYPE = np.dtype(
    [
        ("start", "<i8"),
        ("num_bytes", "<u4"),
        ("number", "<u4"),
        ("prompt_bytes", "<u4"),
        ("max_tokens", "<i4"),
        ("body_hash", "<u8"),
        ("prefixes", "<u4", len(PREFIX_BYTES)),
    ]
)
_MAX_COUNT = 2**31 - 1

UNKNOWN: Final = -1
"""The `max_tokens` of a line that names none, and may fill the context."""


class LineIndex:
    """Index of the lines of one file, in their order.

    The arrays of `records` are `start`, `num_bytes` and `number` (where the line lies in its file,
    and its number there), `prompt_bytes` (of JSON), `max_tokens` (of all its answers together),
    `body_hash` (0 where repeats of the body give results of their own) and `prefixes`.
    """

    def __init__(self, tmp_dir: Path | None = None) -> None:
        self._records = bytearray()
        self._keys = _temporary_file(tmp_dir)

    def __len__(self) -> int:
        return len(self._records) // _RECORD.size

    def add(
        self, start: int, num_bytes: int, number: int, body: Mapping[str, Any] | None = None
    ) -> None:
        """Add the next line; `body` is None for one that is no request."""
        if body is None:
            self._records += _RECORD.pack(start, num_bytes, number, 0, 0, 0, *_NO_PREFIXES)
            return
        key, max_tokens, body_hash = describe(body)
        crc, begin, prefixes = 0, 0, []
        for end in PREFIX_BYTES:
            crc, begin = crc32(key[begin:end], crc), end
            prefixes.append(crc)
        self._keys.write(key[:MAX_KEY_BYTES])
        self._records += _RECORD.pack(
            start, num_bytes, number, min(len(key), _MAX_COUNT), max_tokens, body_hash, *prefixes
        )

    def span(self, place: int) -> tuple[int, int, int]:
        """Return `start`, `num_bytes` and `number` of the line at a place."""
        start, num_bytes, number = _SPAN.unpack_from(self._records, place * _RECORD.size)
        return start, num_bytes, number

    @property
    def records(self) -> NDArray[Any]:
        """A structured array, one record a line; none can be added while it is held."""
        return np.frombuffer(self._records, _DTYPE)

    def keys(self, offsets: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.bytes_]:
        """Return prompts' bytes from offsets of the file of keys on, as long as the longest."""
        self._keys.flush()
        fd, width = self._keys.fileno(), max(1, int(lengths.max(initial=1)))
        keys = np.zeros(len(offsets), f"S{width}")
        room = memoryview(keys.view(np.uint8).data)
        spans = zip(offsets.tolist(), lengths.tolist(), strict=True)
        for start, (offset, length) in zip(range(0, len(room), width), spans, strict=True):
            os.preadv(fd, [room[start : start + length]], offset)
        return keys

    def close(self) -> None:
        """Remove the file of keys."""
        self._keys.close()


def _temporary_file(folder: Path | None) -> IO[bytes]:
    return tempfile.TemporaryFile(dir=folder, buffering=2**18)


_NO_PREFIXES = (0,) * len(PREFIX_BYTES)


def describe(body: Mapping[str, Any]) -> tuple[bytes, int, int]:
    """Return the prompt of a body as bytes, the most tokens of its answers, and the body's hash."""
    key = prompt_key(body)
    most = max_output_tokens(body)
    return key, UNKNOWN if most is None else min(most, _MAX_COUNT), _body_hash(body, key)


def _body_hash(body: Mapping[str, Any], key: bytes) -> int:
    """Return what lines have in common whose results are the same; 0 where they are sampled."""
    if not is_determined(body):
        return 0
    rest = {name: value for name, value in body.items() if name not in PROMPTS}
    digest = blake2b(key, digest_size=8)
    digest.update(to_json(rest))
    return int.from_bytes(digest.digest(), "little") or 1
