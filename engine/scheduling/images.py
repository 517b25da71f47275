"""Images in a prompt: how a model sees them, and what its tokens there stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Fit(NamedTuple):
    """The size that an image is brought to, and the rows and columns of tokens that it becomes.

    Breaks between rows are a column.
    """

    height: int
    width: int
    rows: int
    columns: int


class ImageSizing(Protocol):
    """The rule for the size that images are resized to; a value."""

    def fit(self, height: int, width: int) -> Fit:
        """Return what an image of so many pixels comes to; ValueError says why it cannot."""


@dataclass(frozen=True, slots=True)
class ImageSpec:
    """A model's image inputs: placeholder tokens, sizes and attention.

    Its template writes the token `mark` for one, and in its place the prompt has `spelling`: texts
    and tokens, of which `token` is repeated for each token of the image. `filter` is Pillow's
    number of how an image is brought to its size. Where a model `is_bidirectional`, tokens of an
    image see each other both ways; where it `has_axes`, they are turned by row and column. Where
    it has `breaks`, the last column shows nothing: the first of these tokens ends a row, the second
    the last one.
    """

    mark: int
    token: int
    spelling: tuple[str | int, ...]
    sizes: ImageSizing
    filter: int
    is_bidirectional: bool
    has_axes: bool
    breaks: tuple[int, int] | None = None

    def placeholders(self, rows: int, columns: int) -> list[int]:
        """Return the tokens of a prompt that stand for an image, row by row."""
        if self.breaks is None:
            return [self.token] * (rows * columns)
        row_break, end = self.breaks
        row = [*[self.token] * (columns - 1), row_break]
        return [*(row * rows)[:-1], end]

    def prompt_image(
        self, pixels: NDArray[np.uint8], digest: bytes, start: int, rows: int, columns: int
    ) -> PromptImage:
        """Return an image whose tokens in a prompt begin at `start`."""
        has_breaks = self.breaks is not None
        return PromptImage(
            pixels, digest, start, rows, columns, self.is_bidirectional, has_breaks=has_breaks
        )


@dataclass(frozen=True, slots=True, eq=False)
class PromptImage:
    """An image in a prompt, in place of its tokens from `start` on: `pixels [H, W, 3]`.

    Its tokens lie row by row. Where `is_whole` one step computes all that are not computed yet.
    Those of one `digest` are the same image. Where it `has_breaks` the last column shows nothing.
    """

    pixels: NDArray[np.uint8]
    digest: bytes
    start: int
    rows: int
    columns: int
    is_whole: bool
    has_breaks: bool = False

    @property
    def stop(self) -> int:
        """Return where its tokens end."""
        return self.start + self.rows * self.columns

    def num_shown(self, position: int) -> int:
        """Return how many of its tokens before a position show something of it."""
        count = position - self.start
        return count - count // self.columns if self.has_breaks else count


def whole_stop(images: Sequence[PromptImage], start: int, stop: int) -> int:
    """Return where tokens from `start` on may stop, at `stop` or so that no image is cut.

    That is before an image, or behind one where nothing else would be left.
    """
    for image in images:
        if image.is_whole and image.start < stop < image.stop:
            return image.start if image.start > start else image.stop
    return stop


def axes_of(images: Sequence[PromptImage], num_tokens: int) -> NDArray[np.int32]:
    """Return by what the tokens of a prompt are turned, in time, height and width: `[3, T]`.

    An image is one moment: its tokens lie in its rows and columns, and what follows goes on behind
    the longer side of these. As the Qwen2-VL report has it (Wang et al., 2024).
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
    """Return a prompt as bytes, which begin alike where prompts and their images do."""
    parts, done = [], 0
    for image in images:
        parts += [prompt[done : image.start].tobytes(), image.digest]
        done = image.stop
    return b"".join([*parts, prompt[done:].tobytes()])


def image_digests(images: Sequence[PromptImage], start: int, stop: int) -> bytes:
    """Return what tells tokens `start : stop` of a prompt from others of the same ids."""
    return b"".join(image.digest for image in images if image.start < stop and start < image.stop)


class ImageSpan(NamedTuple):
    """Images among `n` consecutive tokens: see `Step` for their `axes [3, n]` and `ends [n]`.

    `parts` are images with the first of their vectors there and the one after the last, counted
    from their own first; `rows` say for which of the tokens these are.
    """

    axes: NDArray[np.int32]
    ends: NDArray[np.int64]
    rows: NDArray[np.int64]
    parts: list[tuple[PromptImage, int, int]]


def image_span(
    images: Sequence[PromptImage], axes: NDArray[np.int32], start: int, stop: int
) -> ImageSpan:
    """Return what tokens `start : stop` show of a prompt's `images`, turned by its `axes`."""
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
    """Return the axes of tokens; those behind a prompt go on from its last."""
    num_prompt = axes.shape[1]
    if stop <= num_prompt:
        return axes[:, start:stop]
    shift = int(axes[:, -1].max()) + 1 - num_prompt
    written = np.arange(max(start, num_prompt), stop, dtype=np.int32) + shift
    return np.concatenate([axes[:, start:stop], np.tile(written, (3, 1))], axis=1)
