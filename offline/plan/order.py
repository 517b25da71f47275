"""Order of the lines of a file: prompts with common prefixes together, long outputs first.

At each node of a prefix tree over all prompts, the subtree with the longest expected output comes
first, so that requests of a subtree run together and the file does not end with one long answer.
Only neighbours use a prefix: the prefix cache evicts it once the last of them has finished.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .line_index import MAX_KEY_BYTES, PREFIX_BYTES, LineIndex

Places = NDArray[np.int64]

_WINDOW_BYTES: Final = 2**23
_MIN_WIDTH: Final = 16
_MAX_PASSES: Final = 8

_FIRST_LEVEL: Final = 1
"""Below 256 bytes, about 64 tokens, a common prefix is not worth reordering for."""

_BUCKETS_A_DOUBLING: Final = 2


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Prompts in byte order, and the number of bytes that each shares with the previous one."""

    places: Places
    shared: NDArray[np.int64]

    @classmethod
    def from_index(cls, index: LineIndex, places: Places) -> PrefixTree:
        """Return the tree of these lines; equal prompts keep their order."""
        records = index.records
        offsets = np.zeros(len(records) + 1, np.int64)
        np.cumsum(np.minimum(records["prompt_bytes"], MAX_KEY_BYTES), out=offsets[1:])
        prefixes = records["prefixes"][places]
        order = np.lexsort((places, *prefixes.T[::-1]))
        places, prefixes = places[order], prefixes[order]
        lengths = offsets[places + 1] - offsets[places]
        shared = _shared_by_fingerprint(prefixes, lengths)
        tree = cls(places, shared)
        for start, stop in _runs(shared >= PREFIX_BYTES[0]):
            tree._sort(index, offsets, start, stop)
        return tree

    def _sort(self, index: LineIndex, offsets: Places, start: int, stop: int) -> None:
        """Sort neighbours with a common prefix by the bytes after it, one window at a time.

        Windows are as wide as memory allows. After a few passes, only fingerprints are used.
        """
        stack, num_left = [(start, stop)], _MAX_PASSES * (stop - start)
        while stack and num_left > 0:
            start, stop = stack.pop()
            num_left -= stop - start
            places, shared = self.places[start:stop], self.shared[start:stop]
            lengths = offsets[places + 1] - offsets[places]
            depth = int(shared[1:].min())
            width = max(_MIN_WIDTH, _WINDOW_BYTES // len(places))
            keys = index.keys(offsets[places] + depth, np.clip(lengths - depth, 0, width))
            order = np.argsort(keys, kind="stable")
            places[:], keys = places[order], keys[order]
            lengths = lengths[order]
            seen = depth + keys.itemsize
            shared[1:] = depth + _num_common(keys)
            np.minimum(shared[1:], np.minimum(lengths[1:], lengths[:-1]), out=shared[1:])
            is_open = np.append(False, (shared[1:] >= seen) & (lengths[1:] > seen))
            stack += [(start + first, start + last) for first, last in _runs(is_open)]

    def ordered(self, output_tokens: NDArray[np.float64]) -> Places:
        """Return the places in the order to run; `output_tokens` are the expected ones by place.

        Prompts without common prefixes and with outputs of similar length stay in file order.
        """
        if not len(self.places):
            return self.places
        doublings = np.log2(np.maximum(1, output_tokens[self.places]))
        buckets = np.round(_BUCKETS_A_DOUBLING * doublings).astype(np.int64)
        keys: list[Places] = []
        for length in PREFIX_BYTES[_FIRST_LEVEL:]:
            is_first = self.shared < length
            is_first[0] = True
            starts, group = np.flatnonzero(is_first), np.cumsum(is_first) - 1
            longest = np.maximum.reduceat(buckets, starts)
            first = starts if keys else np.minimum.reduceat(self.places, starts)
            keys += [-longest[group], first[group]]
        return self.places[np.lexsort((-buckets, *keys[::-1]))]

    def only(self, is_left: NDArray[np.bool_]) -> PrefixTree:
        """Return the tree of some of its places; `is_left` is by place."""
        chosen = np.flatnonzero(is_left[self.places])
        if not len(chosen):
            return PrefixTree(self.places[:0], self.shared[:0])
        # Two prompts share the minimum of what the neighbours between them share.
        shared = np.minimum.reduceat(self.shared, np.append(0, chosen[:-1] + 1))
        shared[0] = 0
        return PrefixTree(self.places[chosen], shared)


def _shared_by_fingerprint(prefixes: NDArray[Any], lengths: Places) -> NDArray[np.int64]:
    """Return the approximate number of bytes that each prompt shares with the previous one."""
    shared = np.zeros(len(prefixes), np.int64)
    is_equal = np.ones(max(0, len(prefixes) - 1), np.bool_)
    for level, length in enumerate(PREFIX_BYTES):
        is_equal &= prefixes[1:, level] == prefixes[:-1, level]
        shared[1:][is_equal] = length
    np.minimum(shared[1:], np.minimum(lengths[1:], lengths[:-1]), out=shared[1:])
    return shared


def _runs(is_shared: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the ranges of neighbours that share enough with the previous one."""
    starts = np.flatnonzero(~is_shared)
    stops = np.append(starts[1:], len(is_shared))
    is_chosen = stops - starts > 1
    return [*zip(starts[is_chosen].tolist(), stops[is_chosen].tolist(), strict=True)]


def _num_common(keys: NDArray[np.bytes_]) -> Places:
    """Return the length of each key's common prefix with the previous key."""
    width = keys.itemsize
    table = keys.view(np.uint8).reshape(len(keys), width)
    differs = table[1:] != table[:-1]
    return np.where(differs.any(1), differs.argmax(1), width)
