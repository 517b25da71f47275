"""First bytes of Zstandard frames. Format: https://www.rfc-editor.org/rfc/rfc8878.

Python reads them itself only from version 3.14 on, and a package would be half of a Lambda's code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, NamedTuple

MAX_BLOCK_BYTES: Final = 2**17

_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_RAW, _RUN, _COMPRESSED, _SAME_TREE = 0, 1, 2, 3
_PREDEFINED, _ONE, _DESCRIBED, _REPEATED = 0, 1, 2, 3
_MAX_TREE_BITS: Final = 11
_MAX_LITERAL_BITS: Final = {0: 10, 1: 10, 2: 14, 3: 18}
_LONG_COUNT: Final = 0x7F00
_MAX_WORK: Final = 3_000_000
_BLOCK_WORK, _TABLE_WORK, _TREE_WORK, _SEQUENCE_WORK = 32, 512, 2048, 12


class Work:
    """Limit on the work for some frames, a few seconds: few bytes may describe very much.

    A unit is about the time of one literal.
    """

    def __init__(self, left: int = _MAX_WORK) -> None:
        self._left = left

    def spend(self, units: int) -> None:
        """Count units; raises ValueError above the limit."""
        self._left -= units
        if self._left < 0:
            raise ValueError("too much work")


class _State(NamedTuple):
    """An entry of a table of states: its symbol, and the bits and base of the next state."""

    symbol: int
    num_bits: int
    base: int


class _Table(NamedTuple):
    """A table of states, whose number has `num_bits` bits."""

    states: Sequence[_State]
    num_bits: int


class _Kind(NamedTuple):
    """One of the three numbers of a sequence: bits and base of each code, and its tables."""

    extra_bits: Sequence[int]
    bases: Sequence[int]
    max_table_bits: int
    predefined: _Table


class _Bits:
    """A stream of bits that is read from its end; the highest one of the last byte is a mark."""

    def __init__(self, data: bytes) -> None:
        if not data or not data[-1]:
            raise ValueError("no bits")
        self._data = data
        self.left = 8 * len(data) - 9 + data[-1].bit_length()

    def read(self, count: int) -> int:
        """Return the next bits as a number; raises ValueError at their end."""
        end, self.left = self.left, self.left - count
        if self.left < 0:
            raise ValueError("too few bits")
        some = int.from_bytes(self._data[self.left >> 3 : (end + 7) >> 3], "little")
        return some >> (self.left & 7) & ((1 << count) - 1)


@dataclass(slots=True)
class _Frame:
    """Decompressed bytes of a frame, and what its next block may refer to."""

    work: Work
    found: bytearray = field(default_factory=bytearray)
    tree: Sequence[tuple[int, int]] = ()
    tables: dict[int, _Table] = field(default_factory=dict)
    offsets: tuple[int, int, int] = (1, 4, 8)


def unpack_frame(data: bytes, num_bytes: int, work: Work) -> bytes:
    """Return the first bytes of a frame; raises ValueError and LookupError, also if it is cut.

    `work` limits the time, which the number of bytes does not.
    """
    if data[:4] != _MAGIC:
        raise ValueError("not a Zstandard frame")
    flags = data[4]
    has_window, dictionary_bytes = not flags & 32, (0, 1, 2, 4)[flags & 3]
    size_bytes = (0 if has_window else 1, 2, 4, 8)[flags >> 6]
    place = 5 + has_window + dictionary_bytes + size_bytes
    frame, is_last = _Frame(work), False
    while len(frame.found) < num_bytes and not is_last:
        work.spend(_BLOCK_WORK)
        head = int.from_bytes(_bytes(data, place, 3), "little")
        is_last, kind, size = bool(head & 1), head >> 1 & 3, head >> 3
        if size > MAX_BLOCK_BYTES:
            raise ValueError("too large")
        block = _bytes(data, place + 3, 1 if kind == _RUN else size)
        place += 3 + len(block)
        if kind == _COMPRESSED:
            _unpack_block(frame, block)
        elif kind in {_RAW, _RUN}:
            frame.found += block * size if kind == _RUN else block
        else:
            raise ValueError("an unknown block")
    return bytes(frame.found[:num_bytes])


def _unpack_block(frame: _Frame, block: bytes) -> None:
    literals, place = _literals(frame, block)
    num_sequences, place = block[place], place + 1
    if num_sequences == 255:
        num_sequences, place = int.from_bytes(block[place : place + 2], "little"), place + 2
        num_sequences += _LONG_COUNT
    elif num_sequences > 127:
        num_sequences, place = (num_sequences - 128 << 8) + block[place], place + 1
    if not num_sequences:
        frame.found += literals
        return
    modes, place = block[place], place + 1
    for number, kind in enumerate(_KINDS):
        mode = modes >> 6 - 2 * number & 3
        if mode == _PREDEFINED:
            frame.tables[number] = kind.predefined
        elif mode == _ONE:
            frame.tables[number], place = _Table([_State(block[place], 0, 0)], 0), place + 1
        elif mode == _DESCRIBED:
            frame.work.spend(_TABLE_WORK)
            frame.tables[number], place = _read_table(block, place, kind.max_table_bits)
    _run_sequences(frame, _Bits(block[place:]), num_sequences, literals)


def _run_sequences(frame: _Frame, bits: _Bits, num_sequences: int, literals: bytes) -> None:
    """Append literals and copies of earlier bytes by turns."""
    frame.work.spend(_SEQUENCE_WORK * num_sequences)
    found, place, end = frame.found, 0, len(frame.found) + MAX_BLOCK_BYTES
    tables = [frame.tables[number] for number in range(len(_KINDS))]
    lengths, _, copies = _KINDS
    length, offset, copy = (table.states[bits.read(table.num_bits)] for table in tables)
    for number in range(num_sequences):
        value = (1 << offset.symbol) + bits.read(offset.symbol)
        size = copies.bases[copy.symbol] + bits.read(copies.extra_bits[copy.symbol])
        num_literals = lengths.bases[length.symbol] + bits.read(lengths.extra_bits[length.symbol])
        distance = _distance(frame, value, has_literals=num_literals > 0)
        found += _bytes(literals, place, num_literals)
        place += num_literals
        start = len(found) - distance
        if start < 0 or len(found) + size > end:
            raise ValueError("a copy of bytes that are not there")
        piece = found[start : start + size]
        found += (piece * (size // len(piece) + 1))[:size]
        if number + 1 < num_sequences:
            length = tables[0].states[length.base + bits.read(length.num_bits)]
            copy = tables[2].states[copy.base + bits.read(copy.num_bits)]
            offset = tables[1].states[offset.base + bits.read(offset.num_bits)]
    found += literals[place:]


def _distance(frame: _Frame, value: int, *, has_literals: bool) -> int:
    """Return how far back a copy begins; small values refer to the last three copies."""
    first, second, third = frame.offsets
    if value > 3:
        frame.offsets = value - 3, first, second
    elif value + (not has_literals) == 2:
        frame.offsets = second, first, third
    elif value + (not has_literals) == 3:
        frame.offsets = third, first, second
    elif value == 3:
        frame.offsets = first - 1, first, second
    if frame.offsets[0] < 1:
        raise ValueError("a copy of itself")
    return frame.offsets[0]


def _literals(frame: _Frame, block: bytes) -> tuple[bytes, int]:
    """Return the literals of a block, and the place after them."""
    kind, form = block[0] & 3, block[0] >> 2 & 3
    if kind in {_RAW, _RUN}:
        num_head = (1, 2, 1, 3)[form]
        size = int.from_bytes(block[:num_head], "little") >> (4 if form & 1 else 3)
        data = _bytes(block, num_head, 1 if kind == _RUN else size)
        if size > MAX_BLOCK_BYTES:
            raise ValueError("too large")
        return data * size if kind == _RUN else data, num_head + len(data)
    width, num_head = _MAX_LITERAL_BITS[form], (3, 3, 4, 5)[form]
    head = int.from_bytes(block[:num_head], "little") >> 4
    size, packed = head & ((1 << width) - 1), head >> width
    if size > MAX_BLOCK_BYTES:
        raise ValueError("too large")
    data, end = _bytes(block, num_head, packed), num_head + packed
    frame.work.spend(size)
    if kind != _SAME_TREE:
        frame.work.spend(_TREE_WORK)
        frame.tree, num_tree = _read_tree(data)
        data = data[num_tree:]
    if not form:
        return _decode(frame.tree, data, size), end
    each, found, start = (size + 3) // 4, b"", 6
    for number in range(4):
        num_bytes = int.from_bytes(data[2 * number : 2 * number + 2], "little")
        stream = data[start:] if number == 3 else _bytes(data, start, num_bytes)
        found += _decode(frame.tree, stream, size - 3 * each if number == 3 else each)
        start += num_bytes
    return found, end


def _decode(tree: Sequence[tuple[int, int]], data: bytes, count: int) -> bytes:
    """Return the symbols of a stream; a tree has a symbol and its bits for each beginning."""
    left, width = _Bits(data).left, len(tree).bit_length() - 1
    mask, found = (1 << width) - 1, bytearray()
    for _ in range(count):
        start = left - width
        if start >= 0:
            some = int.from_bytes(data[start >> 3 : (left + 7) >> 3], "little") >> (start & 7)
        elif left < 0:
            break
        else:
            some = int.from_bytes(data[: (left + 7) >> 3], "little") << -start
        symbol, num_bits = tree[some & mask]
        found.append(symbol)
        left -= num_bits
    if left:
        raise ValueError("another number of symbols")
    return bytes(found)


def _read_tree(data: bytes) -> tuple[Sequence[tuple[int, int]], int]:
    """Return a Huffman tree as a table, and the bytes of its description."""
    count = data[0]
    if count > 127:
        num_weights = count - 127
        end = 1 + (num_weights + 1) // 2
        packed = _bytes(data, 1, end - 1)
        weights = [half for byte in packed for half in (byte >> 4, byte & 15)][:num_weights]
    else:
        end = 1 + count
        weights = _read_weights(_bytes(data, 1, count))
    total = sum(1 << weight - 1 for weight in weights if weight)
    num_bits = total.bit_length()
    rest = (1 << num_bits) - total
    if not 0 < num_bits <= _MAX_TREE_BITS or rest & (rest - 1) or len(weights) > 255:
        raise ValueError("a damaged tree")
    weights.append(rest.bit_length())
    tree: list[tuple[int, int]] = []
    for weight in range(1, num_bits + 1):
        for symbol, each in enumerate(weights):
            if each == weight:
                tree += [(symbol, num_bits + 1 - weight)] * (1 << weight - 1)
    return tree, end


def _read_weights(data: bytes) -> list[int]:
    """Return weights that two states decode by turns."""
    table, place = _read_table(data, 0, 6)
    bits, weights = _Bits(data[place:]), list[int]()
    one, other = (table.states[bits.read(table.num_bits)] for _ in range(2))
    while bits.left >= one.num_bits:
        weights.append(one.symbol)
        one, other = other, table.states[one.base + bits.read(one.num_bits)]
        if len(weights) > 255:
            raise ValueError("a damaged tree")
    return [*weights, one.symbol, other.symbol]


def _read_table(data: bytes, start: int, max_bits: int) -> tuple[_Table, int]:
    """Return a table of states by its description, and the place after it."""
    bits = int.from_bytes(data[start : start + 128], "little")
    num_bits, place = (bits & 15) + 5, 4
    left, shares = 1 << num_bits, list[int]()
    if num_bits > max_bits:
        raise ValueError("too large a table")
    while left > 0 and len(shares) < 256:
        width = (left + 1).bit_length()
        value, low = bits >> place & ((1 << width) - 1), (1 << width - 1) - 1
        short = (1 << width) - 2 - left
        place += width
        if value & low < short:
            value, place = value & low, place - 1
        elif value > low:
            value -= short
        shares.append(value - 1)
        left -= abs(value - 1)
        while value == 1:
            repeat = bits >> place & 3
            shares += [0] * repeat
            place += 2
            if repeat < 3:
                break
    end = start + (place + 7) // 8
    if left or len(shares) > 256 or end > len(data):
        raise ValueError("a damaged table")
    return _table(shares, num_bits), end


def _table(shares: Sequence[int], num_bits: int) -> _Table:
    """Return the table of states whose symbols have these shares; -1 is a share below one."""
    size = 1 << num_bits
    symbols, end = [0] * size, size
    for symbol, share in enumerate(shares):
        if share < 0:
            end -= 1
            symbols[end] = symbol
    place, step = 0, (size >> 1) + (size >> 3) + 3
    for symbol, share in enumerate(shares):
        for _ in range(share):
            symbols[place] = symbol
            place = (place + step) & (size - 1)
            while place >= end:
                place = (place + step) & (size - 1)
    following, states = [abs(share) for share in shares], []
    for symbol in symbols:
        number = following[symbol]
        following[symbol] += 1
        width = num_bits + 1 - number.bit_length()
        states.append(_State(symbol, width, (number << width) - size))
    return _Table(states, num_bits)


def _bytes(data: bytes, start: int, count: int) -> bytes:
    """Return bytes; raises ValueError if there are fewer."""
    found = data[start : start + count]
    if len(found) < count:
        raise ValueError("truncated")
    return found


def _kind(extra_bits: Sequence[int], first: int, max_bits: int, predefined: _Table) -> _Kind:
    bases = accumulate((1 << each for each in extra_bits), initial=first)
    return _Kind(extra_bits, [*bases], max_bits, predefined)


_LONG_BITS: Final = [1, 1, 1, 1, 2, 2, 3, 3]
_KINDS: Final = (
    _kind(
        [*[0] * 16, *_LONG_BITS, 4, *range(6, 17)],
        0,
        9,
        _table([4, 3, *[2] * 11, 1, 1, 1, *[2] * 9, 3, 2, *[1] * 5, *[-1] * 4], 6),
    ),
    _kind([], 0, 8, _table([*[1] * 6, 2, 2, 2, *[1] * 15, *[-1] * 5], 5)),
    _kind(
        [*[0] * 32, *_LONG_BITS, 4, 4, 5, *range(7, 17)],
        3,
        9,
        _table([1, 4, 3, *[2] * 6, *[1] * 37, *[-1] * 7], 6),
    ),
)
"""Literals before a copy, its distance, and its size."""
