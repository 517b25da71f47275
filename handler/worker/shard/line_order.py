"""Line order over the shards of a batch: prompts with a common prefix run together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from zlib import crc32

from tidemill.batch.file.lines import LineError, RawLine, parse_line
from tidemill.protocol.prompt_key import prompt_key

Rank = tuple[int, ...]

BLOCK_BYTES: Final = 512
"""About 128 tokens: shorter shared prefixes do not justify reordering."""

MAX_BLOCKS: Final = 32


def block_hashes(line: RawLine) -> list[int]:
    """Return the hash of a prompt up to the end of each of its first blocks, if it has any."""
    try:
        prompt = prompt_key(parse_line(line).body)
    except LineError:
        return []
    num_blocks = min(MAX_BLOCKS, len(prompt) // BLOCK_BYTES)
    hashes, last = [], 0
    for start in range(0, num_blocks * BLOCK_BYTES, BLOCK_BYTES):
        last = crc32(prompt[start : start + BLOCK_BYTES], last)
        hashes.append(last)
    return hashes


class LineOrder:
    """Order of shards' lines: lines with a common prefix come at the place of the first of them.

    Lines that share nothing keep the order in which they were added. All of them come before the
    lines of an order with a higher `number`.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._first: dict[int, int] = {}
        self._num_lines = 0

    def add(self, lines: Iterable[list[int]]) -> list[Rank]:
        """Add the next lines by their block hashes; return their ranks."""
        ranks = []
        for line, hashes in enumerate(lines, start=self._num_lines):
            firsts = (self._first.setdefault(block, line) for block in hashes)
            ranks.append((self._number, *firsts, line))
        self._num_lines += len(ranks)
        return ranks
