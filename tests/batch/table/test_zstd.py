"""First bytes of Zstandard frames, compared with Arrow's."""

from __future__ import annotations

import random
from contextlib import suppress

import pyarrow as pa
import pytest

from tidemill.batch.table.zstd import Work, unpack_frame

WORDS = [random.Random(1).randbytes(each % 9 + 1).hex() for each in range(400)]


def text(num_words: int, seed: int) -> bytes:
    """Return words in a random order."""
    return " ".join(random.Random(seed).choices(WORDS, k=num_words)).encode()


CASES = {
    "nothing": b"",
    "a byte": b"x",
    "one byte, repeated": b"x" * 300_000,
    "random": random.Random(2).randbytes(200_000),
    "words": text(20_000, 3),
    "few words": text(30, 4),
    "numbers": b"".join(each.to_bytes(8, "little") for each in range(9000)),
    "bytes of a narrow range": bytes(random.Random(5).choices(range(20), k=70_000)),
    "long copies": text(2000, 6) * 30,
}


@pytest.mark.parametrize("level", [1, 3, 19])
@pytest.mark.parametrize("name", CASES)
def test_frames_are_unpacked_as_arrow_does(name: str, level: int) -> None:
    """Every kind of block and table occurs; the first bytes alone are the same."""
    data = CASES[name]
    packed = pa.Codec("zstd", compression_level=level).compress(data, asbytes=True)
    assert unpack_frame(packed, len(data), Work()) == data
    assert unpack_frame(packed, 100, Work()) == data[:100]


def test_no_damage_raises_another_error_or_takes_long() -> None:
    """Truncated and changed bytes are an error, or other bytes."""
    packed = pa.Codec("zstd").compress(text(800, 7), asbytes=True)
    for at in range(0, len(packed), 5):
        for damaged in (packed[:at], packed[:at] + b"\xff" + packed[at + 1 :]):
            with suppress(ValueError, LookupError):
                assert len(unpack_frame(damaged, 2**20, Work())) <= 2**20


def test_a_frame_of_few_bytes_and_many_copies_is_refused() -> None:
    """Each block describes 43,000 copies of three bytes in ten bytes, which would take seconds."""
    copies = bytes([0, 255, 0x20, 0x28, 0b01010100, 0, 0, 0, 1])  # no literals, and no bits
    block = (len(copies) << 3 | 2 << 1).to_bytes(3, "little") + copies
    start = (16 << 3).to_bytes(3, "little") + bytes(16)
    with pytest.raises(ValueError, match="too much work"):
        unpack_frame(b"\x28\xb5\x2f\xfd\x00\x58" + start + 32 * block, 2**22, Work())
