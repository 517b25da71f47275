"""Images in a prompt: how a model sees them, and what their tokens represent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Fit(NamedTuple):
    """The size that an image is resized to, and the resulting rows and columns of tokens.

    Breaks between rows count as a column.
    """

    height: int
    width: int
    rows: int
    columns: int


class ImageSizing(Protocol):
    """The rule for the size that images are resized to; compared by value."""

    def fit(self, height: int, width: int) -> Fit:
        """Return the fit of an image of this size; raise ValueError if there is none."""


class ImageTiling(Protocol):
    """The rule for the tiles that images are cut into, squares of `side` pixels."""

    @property
    def side(self) -> int:
        """Return the side of a tile."""

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of tiles for an image of this size."""


@dataclass(frozen=True, slots=True)
class ImageForm:
    """The form of a model's images: their size, and Pillow's number of the resampling filter.

    With a `crop` only the central square of that many pixels remains.
    """

    sizes: ImageSizing
    filter: int
    crop: int | None = None

    tiling: ClassVar[None] = None


@dataclass(frozen=True, slots=True)
class ImageSpec:
    """A model's image inputs: placeholder tokens, sizes and attention.

    Its template writes the token `mark` for an image, and the prompt replaces it with `spelling`:
    texts and tokens, of which `token` is repeated for each token of the image. `filter` is Pillow's
    number of the resampling filter. If a model `is_bidirectional`, tokens of an image attend to
    each other in both directions; if it `has_axes`, they are rotated by row and column. If it has
    `breaks`, the last column shows nothing: the first break token ends a row, the second the last
    row. With a `tiling` its pixels are a column of tiles, the last of several shows the whole.
    """

    mark: int
    token: int
    spelling: tuple[str | int, ...]
    sizes: ImageSizing
    filter: int
    is_bidirectional: bool
    has_axes: bool
    breaks: tuple[int, int] | None = None
    tiling: ImageTiling | None = None

    crop: ClassVar[None] = None

    def placeholders(self, rows: int, columns: int) -> list[int]:
        """Return the placeholder tokens of an image in a prompt, row by row."""
        if self.breaks is None:
            return [self.token] * (rows * columns)
        row_break, end = self.breaks
        row = [*[self.token] * (columns - 1), row_break]
        return [*(row * rows)[:-1], end]

    def prompt_image(
        self, pixels: NDArray[Any], digest: bytes, start: int, rows: int, columns: int
    ) -> PromptImage:
        """Return an image whose tokens in a prompt begin at `start`."""
        has_breaks = self.breaks is not None
        return PromptImage(
            pixels, digest, start, rows, columns, self.is_bidirectional, has_breaks=has_breaks
        )


@dataclass(frozen=True, slots=True, eq=False)
class PromptImage:
    """An image in a prompt, in place of its tokens from `start`: `pixels [H, W, 3]`.

    Its tokens are stored row by row. If it `is_whole`, one step computes all remaining tokens.
    Images with equal `digest` are the same. If it `has_breaks`, the last column shows nothing.
    The `pixels` of a recording are its features, `[mels, frames]`.
    """

    pixels: NDArray[Any]
    digest: bytes
    start: int
    rows: int
    columns: int
    is_whole: bool
    has_breaks: bool = False

    @property
    def stop(self) -> int:
        """Return the end of its tokens."""
        return self.start + self.rows * self.columns

    def num_shown(self, position: int) -> int:
        """Return the number of its tokens before a position, not counting breaks."""
        count = position - self.start
        return count - count // self.columns if self.has_breaks else count


def whole_stop(images: Sequence[PromptImage], start: int, stop: int) -> int:
    """Return a stop for tokens from `start`: `stop`, or an earlier or later one that cuts no image.

    That is before an image, or after it if nothing else would be left.
    """
    for image in images:
        if image.is_whole and image.start < stop < image.stop:
            return image.start if image.start > start else image.stop
    return stop


def axes_of(images: Sequence[PromptImage], num_tokens: int) -> NDArray[np.int32]:
    """Return the rotation positions of a prompt's tokens in time, height and width: `[3, T]`.

    An image is one moment: its tokens have the positions of its rows and columns, and the next
    token follows the longer side. This is the scheme of the Qwen2-VL report (Wang et al., 2024).
    """
    axes = np.empty((3, num_tokens), np.int32)
    place = done = 0
    for image in images:
        axes[:, done : image.start] = np.arange(place, place + image.start - done)
        place += image.start - done
        grid = np.indices((1, image.rows, image.columns)).reshape(3, -1)
        axes[:, image.start : image.stop] = place + grid
        place, done = place + max(image.rows, image.columns), image.stop
    axes[:, done:] = np.arange(place, place + num_tokens - done)
    return axes


def prompt_key(prompt: NDArray[np.int32], images: Sequence[PromptImage]) -> bytes:
    """Return a prompt as bytes with equal prefixes for equal prefixes of tokens and images."""
    parts, done = [], 0
    for image in images:
        parts += [prompt[done : image.start].tobytes(), image.digest]
        done = image.stop
    return b"".join([*parts, prompt[done:].tobytes()])


def image_digests(images: Sequence[PromptImage], start: int, stop: int) -> bytes:
    """Return bytes that distinguish tokens `start : stop` from others with equal ids."""
    return b"".join(image.digest for image in images if image.start < stop and start < image.stop)


class ImageSpan(NamedTuple):
    """Images among `n` consecutive tokens: see `Step` for their `axes [3, n]` and `ends [n]`.

    `parts` are images with the range of their vectors in the span, counted from each image's own
    first vector; `rows` are the positions of these vectors among the tokens.
    """

    axes: NDArray[np.int32]
    ends: NDArray[np.int64]
    rows: NDArray[np.int64]
    parts: list[tuple[PromptImage, int, int]]


def image_span(
    images: Sequence[PromptImage], axes: NDArray[np.int32], start: int, stop: int
) -> ImageSpan:
    """Return the part of a prompt's `images` in tokens `start : stop`, with their `axes`."""
    ends, rows, parts = np.arange(start, stop) + 1, [], []
    for image in images:
        begin, end = max(start, image.start), min(stop, image.stop)
        if begin < end:
            own = np.arange(begin, end)
            if image.has_breaks:
                own = own[(own - image.start + 1) % image.columns != 0]
            rows.append(own - start)
            parts.append((image, image.num_shown(begin), image.num_shown(end)))
            if image.is_whole:
                ends[rows[-1]] = image.stop
    return ImageSpan(
        axes=_axes_between(axes, start, stop),
        ends=ends,
        rows=np.concatenate(rows) if rows else np.empty(0, np.int64),
        parts=parts,
    )


def _axes_between(axes: NDArray[np.int32], start: int, stop: int) -> NDArray[np.int32]:
    """Return the axes of tokens; those after a prompt continue from its last."""
    num_prompt = axes.shape[1]
    if stop <= num_prompt:
        return axes[:, start:stop]
    shift = int(axes[:, -1].max()) + 1 - num_prompt
    generated = np.arange(max(start, num_prompt), stop, dtype=np.int32) + shift
    return np.concatenate([axes[:, start:stop], np.tile(generated, (3, 1))], axis=1)
