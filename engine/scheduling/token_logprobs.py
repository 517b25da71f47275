"""Log-probabilities of a sequence's tokens, packed: 12 bytes per token, 8 more per alternative."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

# A pair of a token and its log-probability; a record has `num_top` after its own.
_PAIR = [("token_id", "<i4"), ("logprob", "<f4")]
HEAD_BYTES, PAIR_BYTES = 12, 8

# Token, log-probability, rank (0: not counted), alternatives.
LogprobRow = tuple[int, float, int, list[tuple[int, float]]]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one token and of the most likely ones (best first).

    Prompt tokens also have a `rank` among all tokens, starting at 1.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


def record_bytes(num_top: int) -> int:
    """Return the size in bytes of a record of one token with `num_top` alternatives."""
    return HEAD_BYTES + PAIR_BYTES * num_top


@cache
def _record(num_top: int) -> np.dtype[np.void]:
    return np.dtype([*_PAIR, ("rank", "<i4"), ("top", _PAIR, (num_top,))])


def pack_logprobs(
    token_ids: NDArray[Any],  # [M]
    logprobs: NDArray[Any],  # [M]
    top_ids: NDArray[Any],  # [M, K]
    top_logprobs: NDArray[Any],  # [M, K]
    ranks: NDArray[Any] | int = 0,  # [M], 0: not counted
) -> NDArray[np.uint8]:
    """Return records of `M` tokens, `[M, record_bytes(K)]`.

    The alternatives come last, so that a record of fewer is the beginning of one of more.
    """
    records = np.empty(len(token_ids), _record(top_ids.shape[1]))
    records["token_id"], records["logprob"], records["rank"] = token_ids, logprobs, ranks
    records["top"]["token_id"], records["top"]["logprob"] = top_ids, top_logprobs
    return records.view(np.uint8).reshape(len(records), record_bytes(top_ids.shape[1]))


def pack_pairs(token_ids: NDArray[Any], logprobs: NDArray[Any]) -> NDArray[np.uint8]:
    """Return pairs as in a record after its own token: `[M]`, `[M]` → `[M, PAIR_BYTES]`."""
    pairs = np.empty(len(token_ids), _PAIR)
    pairs["token_id"], pairs["logprob"] = token_ids, logprobs
    return pairs.view(np.uint8).reshape(len(pairs), PAIR_BYTES)


def narrow_records(records: bytes, num_top: int, fewer: int) -> bytes:
    """Return records with `num_top` alternatives reduced to `fewer` alternatives."""
    if fewer >= num_top:
        return records
    grid = np.frombuffer(records, np.uint8).reshape(-1, record_bytes(num_top))
    return grid[:, : record_bytes(fewer)].tobytes()


class TokenLogprobs(Sequence["TokenLogprob | None"]):
    """Log-probabilities of consecutive tokens, each with `num_top` alternatives.

    The entries of the first `num_unscored` tokens are None. A step appends packed records; entries
    are created when they are read.
    """

    __slots__ = ("_num_bytes", "_parts", "num_top", "num_unscored", "record_bytes")

    def __init__(self, num_top: int, num_unscored: int = 0, data: bytes = b"") -> None:
        self.num_top = num_top
        self.num_unscored = num_unscored
        self.record_bytes = record_bytes(num_top)
        self._parts = [data]
        self._num_bytes = len(data)

    def append(self, records: bytes) -> None:
        """Append records of the next tokens, as returned by `pack_logprobs`."""
        self._parts.append(records)
        self._num_bytes += len(records)

    def truncate(self, length: int) -> None:
        """Drop the entries from a scored position on."""
        if length < len(self):
            self._parts = [self.records(self.num_unscored, length)]
            self._num_bytes = len(self._parts[0])

    def records(self, start: int, stop: int) -> bytes:
        """Return the records of some entries, all of which are scored."""
        size, end, parts = self.record_bytes, self._num_bytes, []
        first, last = ((place - self.num_unscored) * size for place in (start, stop))
        for part in reversed(self._parts):  # usually the last ones are requested
            if end <= first:
                break
            parts.append(part)
            end -= len(part)
        return b"".join(reversed(parts))[first - end : last - end]

    def rows(self, least: float = -math.inf) -> list[LogprobRow | None]:
        """Return the entries as tuples, with no log-probability below `least`."""
        data = self.records(self.num_unscored, len(self))
        records = np.frombuffer(data, _record(self.num_top)).copy()
        for scored in (records, records["top"]):
            np.maximum(scored["logprob"], least, out=scored["logprob"])
        columns = [records[name].tolist() for name in ("token_id", "logprob", "rank", "top")]
        return [None] * self.num_unscored + list(zip(*columns, strict=True))

    def narrowed(self, num_top: int) -> TokenLogprobs:
        """Return the entries with fewer alternatives."""
        if num_top >= self.num_top:
            return self
        data = self.records(self.num_unscored, len(self))
        return TokenLogprobs(
            num_top, self.num_unscored, narrow_records(data, self.num_top, num_top)
        )

    def part(self, start: int, stop: int) -> TokenLogprobs:
        """Return a range of the entries, limited to the existing ones."""
        stop = min(stop, len(self))
        num_unscored = max(0, min(stop, self.num_unscored) - start)
        data = self.records(start + num_unscored, max(start + num_unscored, stop))
        return TokenLogprobs(self.num_top, num_unscored, data)

    def __len__(self) -> int:
        """Return the number of tokens, including the first unscored ones."""
        return self.num_unscored + self._num_bytes // self.record_bytes

    @overload
    def __getitem__(self, index: int) -> TokenLogprob | None: ...

    @overload
    def __getitem__(self, index: slice) -> list[TokenLogprob | None]: ...

    def __getitem__(self, index: int | slice) -> TokenLogprob | list[TokenLogprob | None] | None:
        """Return entries; this creates all of them, so prefer to iterate."""
        return list(self)[index]

    def __iter__(self) -> Iterator[TokenLogprob | None]:
        """Yield the entries."""
        for row in self.rows():
            if row is None:
                yield None
            else:
                token_id, logprob, rank, top = row
                yield TokenLogprob(token_id, logprob, tuple(top), rank or None)

    def __eq__(self, other: object) -> bool:
        """Return whether the entries are equal."""
        if not isinstance(other, TokenLogprobs):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


NO_LOGPROBS = TokenLogprobs(0)
"""An empty list of log-probabilities."""
