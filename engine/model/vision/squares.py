"""Sizes of images that keep their shape: whole squares of pixels, each of which is one token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ...scheduling.images import Fit


@dataclass(frozen=True, slots=True)
class BySquares:
    """An image keeps its shape, resized to whole squares of `square` pixels, one token each.

    The result has between `min_pixels` and `max_pixels`, as far as whole squares allow. The class
    has the `limits` of a config without any, which count each of a patch's frames if it
    `counts_frames`.
    """

    square: int
    min_pixels: int
    max_pixels: int

    limits: ClassVar[tuple[int, int]] = (56 * 56, 28 * 28 * 1280)
    counts_frames: ClassVar[bool] = False

    def fit(self, height: int, width: int) -> Fit:
        """Return the nearest whole squares: transformers' `smart_resize`."""
        height, width = self.enlarged(height, width)
        if max(height, width) > 200 * min(height, width):
            raise ValueError("its aspect ratio is above 200")
        square = self.square
        tall, wide = (round(side / square) * square for side in (height, width))
        if tall * wide > self.max_pixels:
            ratio = math.sqrt(height * width / self.max_pixels)
            tall, wide = (
                max(square, math.floor(side / ratio / square) * square) for side in (height, width)
            )
        elif tall * wide < self.min_pixels:
            ratio = math.sqrt(self.min_pixels / (height * width))
            tall, wide = (math.ceil(side * ratio / square) * square for side in (height, width))
        return Fit(tall, wide, tall // square, wide // square)

    def enlarged(self, height: int, width: int) -> tuple[int, int]:
        """Return an image's height and width before they become whole squares."""
        return height, width


@dataclass(frozen=True, slots=True)
class GlmSquares(BySquares):
    """The squares of GLM-V: both sides of an image are first enlarged to a square's."""

    limits: ClassVar[tuple[int, int]] = (112 * 112, 28 * 28 * 15_000)
    counts_frames: ClassVar[bool] = True

    def enlarged(self, height: int, width: int) -> tuple[int, int]:
        """Return sides of at least one square, in the order of operations of transformers."""
        if min(height, width) >= self.square:
            return height, width
        scale = max(self.square / height, self.square / width)
        return int(height * scale), int(width * scale)


@dataclass(frozen=True, slots=True)
class PaddleSquares(BySquares):
    """The squares of PaddleOCR-VL: as GLM-V's, but rounded to the nearest pixel."""

    limits: ClassVar[tuple[int, int]] = (384 * 384, 1536 * 1536)

    def enlarged(self, height: int, width: int) -> tuple[int, int]:
        """Return sides of at least one square, the lower ones first."""
        if height < self.square:
            height, width = self.square, round(width * self.square / height)
        if width < self.square:
            height, width = round(height * self.square / width), self.square
        return height, width
