"""Weight parts: the stored tensors that fill a weight, and their places in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from torch import Tensor

from ...kernels.communicator import Shard
from ..config.architecture import Architecture

# Takes a weight and returns the view of it to which a stored tensor is copied.
Place = Callable[[Tensor], Tensor]

WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class Part:
    """A stored tensor: its name and shape, the part that is read, and its place in a weight.

    `taken` is read of its first axes, and everything of the others.
    """

    key: str
    shape: tuple[int, ...]
    place: Place
    taken: tuple[range, ...] = ()

    @property
    def read_shape(self) -> tuple[int, ...]:
        """Return the shape of the part that is read."""
        return (*map(len, self.taken), *self.shape[len(self.taken) :])

    @property
    def count(self) -> int:
        """Return the number of elements that are read."""
        return prod(self.read_shape)


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight by its role in the decoder; its parts fill it.

    With `kinds`, as named by safetensors, the stored dtype is kept; otherwise any float is allowed.
    """

    role: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    kinds: frozenset[str] | None = None


class Band(NamedTuple):
    """Rows `taken` of a stored tensor, which has `height` of them."""

    name: str
    height: int
    taken: range


def suffix_of(kind: str) -> str:
    """Return the suffix of the role of a tensor of a kind."""
    return "_bias" if kind == "bias" else ""


def interleaved(both: Tensor) -> Tensor:
    """Return `[E, 2·I, …]`, gates before ups, as `[E, …, 2·I]`, each gate before its up."""
    count, width = both.shape[0], both.shape[1] // 2
    pairs = both.view(count, 2, width, *both.shape[2:]).transpose(1, 2)  # [E, I, 2, …]
    return pairs.movedim((1, 2), (-2, -1))  # [E, …, I, 2]


def pairs(start: int, stop: int, width: int) -> Place:
    """Return rows of heads of a width as `[heads, width / 2, 2, …]`: halves turn together."""

    def place(weight: Tensor) -> Tensor:
        rows_of = weight[start:stop]
        return rows_of.view(-1, 2, width // 2, *weight.shape[1:]).transpose(1, 2)

    return place


def turned(weight: Tensor) -> Tensor:
    """Return a matrix, transposed as it is stored."""
    return weight.T


def turned_between(start: int, stop: int) -> Place:
    """Return the place of rows that are stored as columns."""
    return lambda weight: weight[start:stop].T


def turned_band(start: int, stop: int) -> Place:
    """Return the place of rows of every expert that are stored as columns."""
    return lambda weight: weight[:, start:stop].transpose(1, 2)


def transposed(weight: Tensor) -> Tensor:
    """Return every expert's matrix, transposed as it is stored."""
    return weight.transpose(1, 2)


def everything(weight: Tensor) -> Tensor:
    """Return the whole weight."""
    return weight


def columns(start: int, stop: int) -> Place:
    """Return the place of rows of every expert."""
    return lambda weight: weight[:, start:stop]


def rows_of_one(index: int, start: int, stop: int) -> Place:
    """Return the place of rows of one expert."""
    return lambda weight: weight[index, start:stop]


def rows(names: tuple[str, ...], heights: tuple[int, ...]) -> list[tuple[str, int]]:
    """Return names with their numbers of rows; one name has all of them."""
    return [(names[0], sum(heights))] if len(names) == 1 else list(zip(names, heights, strict=True))


def whole(role: str, key: str, *shape: int, kinds: frozenset[str] | None = None) -> Weight:
    """Return a weight that is stored in this form."""
    return Weight(role, shape, (Part(key, shape, everything),), kinds)


def table(
    role: str, name: str, architecture: Architecture, shard: Shard = WHOLE, *, kind: str = "weight"
) -> Weight:
    """Return a rank's rows of the vocabulary: equally many per rank, padded with zeros."""
    count = architecture.vocab_size
    width = (architecture.hidden_size,) if kind == "weight" else ()
    own = shard.indices(count)
    part = Part(f"{name}.{kind}", (count, *width), between(0, len(own)), (own,))
    rows_made = len(Shard(0, shard.size).indices(count))
    return Weight(role + suffix_of(kind), (rows_made, *width), (part,))


def table_ends(weight: Weight, count: int) -> Weight:
    """Return a table of the first and the last rows of a vocabulary, `count` of each."""
    (part,) = weight.parts
    height = part.shape[0]
    ends = (
        replace(part, place=between(start, start + count), taken=(taken,))
        for start, taken in ((0, range(count)), (count, range(height - count, height)))
    )
    return Weight(weight.role, (2 * count, *part.shape[1:]), tuple(ends))


def stacked(
    role: str, prefix: str, kind: str, heights: list[tuple[str, int]], *width: int
) -> Weight:
    """Return a weight of tensors above each other, given with their numbers of rows."""
    bands = [Band(name, height, range(height)) for name, height in heights]
    return banded(role, prefix, kind, bands, *width)


def banded(
    role: str,
    prefix: str,
    kind: str,
    bands: list[Band],
    *width: int,
    paired: tuple[int, ...] = (),
    is_transposed: bool = False,
) -> Weight:
    """Return a weight of rows of tensors above each other, or of columns that are side by side.

    The first bands are heads of `paired` numbers, whose neighbours are rotated together.
    """
    parts, start = [], 0
    for index, (name, height, taken) in enumerate(bands):
        stop = start + len(taken)
        key, place = f"{prefix}{name}.{kind}", between(start, stop)
        if index < len(paired):
            place = pairs(start, stop, paired[index])
        if is_transposed and width:
            columns = (range(*width), taken)
            parts.append(Part(key, (*width, height), turned_between(start, stop), columns))
        else:
            parts.append(Part(key, (height, *width), place, (taken,)))
        start = stop
    return Weight(role, (start, *width), tuple(parts))


def bands_of(
    names: tuple[str, ...], heights: list[int], taken: list[range], *, is_joined: bool = True
) -> list[Band]:
    """Return the read bands of tensors of these heights, or of one that has all of their rows.

    Adjacent bands of one tensor are merged if `is_joined`.
    """
    if len(names) > 1:
        return [Band(*band) for band in zip(names, heights, taken, strict=True)]
    total, above, bands = sum(heights), 0, list[Band]()
    for height, own in zip(heights, taken, strict=True):
        rows_of = range(above + own.start, above + own.stop)
        if is_joined and bands and bands[-1].taken.stop == rows_of.start:
            rows_of = range(bands.pop().taken.start, rows_of.stop)
        bands.append(Band(names[0], total, rows_of))
        above += height
    return bands


def sliced(role: str, key: str, shape: tuple[int, ...], *taken: range | None) -> Weight:
    """Return a weight that is a part of a stored tensor's first axes; None is all."""
    axes = zip(taken, shape, strict=False)
    part = Part(key, shape, everything, tuple(range(n) if own is None else own for own, n in axes))
    return Weight(role, part.read_shape, (part,))


def head_rows(heads: range, width: int) -> range:
    """Return the rows of heads with `dim` rows each."""
    return range(heads.start * width, heads.stop * width)


def between(start: int, stop: int) -> Place:
    """Return the place of rows."""
    return lambda weight: weight[start:stop]
