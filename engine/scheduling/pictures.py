"""Images in a prompt: how a model sees them, and what its tokens there stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Fit(NamedTuple):
    """The size that an image is brought to, and the rows and columns of tokens that it becomes."""

    height: int
    width: int
    rows: int
    columns: int


class FitsImages(Protocol):
    """By which rule a model wants the size of images; a value."""

    def fit(self, height: int, width: int) -> Fit:
        """Return what an image of so many pixels comes to; ValueError says why it cannot."""


@dataclass(frozen=True, slots=True)
class Sight:
    """How a model sees images.

    Its template writes the token `mark` for one, and in its place the prompt has `spelling`: texts
    and tokens, of which `token` is repeated for each token of the image. `filter` is Pillow's
    number of how an image is brought to its size. Where a model `sees_whole`, tokens of an image
    see each other both ways; where it `has_axes`, they are turned by row and column.
    """

    mark: int
    token: int
    spelling: tuple[str | int, ...]
    sizes: FitsImages
    filter: int
    sees_whole: bool
    has_axes: bool


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """An image in a prompt, in place of its tokens from `start` on: `pixels [H, W, 3]`.

    Its tokens lie row by row. Where `is_whole` one step computes all that are not computed yet.
    Those of one `digest` are the same image.
    """

    pixels: NDArray[np.uint8]
    digest: bytes
    start: int
    rows: int
    columns: int
    is_whole: bool

    @property
    def stop(self) -> int:
        """Return where its tokens end."""
        return self.start + self.rows * self.columns


def whole_stop(pictures: Sequence[Picture], start: int, stop: int) -> int:
    """Return where tokens from `start` on may stop, at `stop` or so that no image is cut.

    That is before an image, or behind one where nothing else would be left.
    """
    for picture in pictures:
        if picture.is_whole and picture.start < stop < picture.stop:
            return picture.start if picture.start > start else picture.stop
    return stop


def axes_of(pictures: Sequence[Picture], num_tokens: int) -> NDArray[np.int32]:
    """Return by what the tokens of a prompt are turned, in time, height and width: `[3, T]`.

    An image is one moment: its tokens lie in its rows and columns, and what follows goes on behind
    the longer side of these. As the Qwen2-VL report has it (Wang et al., 2024).
    """
    axes = np.empty((3, num_tokens), np.int32)
    place = done = 0
    for picture in pictures:
        axes[:, done : picture.start] = np.arange(place, place + picture.start - done)
        place += picture.start - done
        grid = np.indices((1, picture.rows, picture.columns)).reshape(3, -1)
        axes[:, picture.start : picture.stop] = place + grid
        place, done = place + max(picture.rows, picture.columns), picture.stop
    axes[:, done:] = np.arange(place, place + num_tokens - done)
    return axes


def named(prompt: NDArray[np.int32], pictures: Sequence[Picture]) -> bytes:
    """Return a prompt as bytes, which begin alike where prompts and their images do."""
    parts, done = [], 0
    for picture in pictures:
        parts += [prompt[done : picture.start].tobytes(), picture.digest]
        done = picture.stop
    return b"".join([*parts, prompt[done:].tobytes()])


def digest_within(pictures: Sequence[Picture], start: int, stop: int) -> bytes:
    """Return what tells tokens `start : stop` of a prompt from others of the same ids."""
    return b"".join(
        picture.digest for picture in pictures if picture.start < stop and start < picture.stop
    )


class ShownSpan(NamedTuple):
    """What `n` consecutive tokens show: see `Step` for their `axes [3, n]` and `ends [n]`.

    `parts` are images with the first of their tokens there and the one after the last, counted from
    their own first; `rows` say which of the tokens these are.
    """

    axes: NDArray[np.int32]
    ends: NDArray[np.int64]
    rows: NDArray[np.int64]
    parts: list[tuple[Picture, int, int]]


def shown_between(
    pictures: Sequence[Picture], axes: NDArray[np.int32], start: int, stop: int
) -> ShownSpan:
    """Return what tokens `start : stop` show of a prompt's `pictures`, turned by its `axes`."""
    ends, rows, parts = np.arange(start, stop) + 1, [], []
    for picture in pictures:
        begin, end = max(start, picture.start), min(stop, picture.stop)
        if begin < end:
            rows.append(np.arange(begin, end) - start)
            parts.append((picture, begin - picture.start, end - picture.start))
            if picture.is_whole:
                ends[rows[-1]] = picture.stop
    return ShownSpan(
        axes=_axes_between(axes, start, stop),
        ends=ends,
        rows=np.concatenate(rows) if rows else np.empty(0, np.int64),
        parts=parts,
    )


def _axes_between(axes: NDArray[np.int32], start: int, stop: int) -> NDArray[np.int32]:
    """Return the axes of tokens; those behind a prompt go on from its last."""
    num_prompt = axes.shape[1]
    if stop <= num_prompt:
        return axes[:, start:stop]
    shift = int(axes[:, -1].max()) + 1 - num_prompt
    written = np.arange(max(start, num_prompt), stop, dtype=np.int32) + shift
    return np.concatenate([axes[:, start:stop], np.tile(written, (3, 1))], axis=1)
