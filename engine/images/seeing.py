"""An image as a model sees it: brought to the size that the model wants, and named."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from engine.allocator import trim_heap
from engine.backpressure import MemoryBudget
from engine.images.decoding import ImageRefused, decode, peak_bytes
from engine.scheduling.pictures import Picture, Sight

_LARGE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """An image as `rows` and `columns` of tokens; those of one `digest` are the same."""

    pixels: NDArray[np.uint8]  # [H, W, 3]
    digest: bytes
    rows: int
    columns: int

    @property
    def num_tokens(self) -> int:
        """Return how many tokens of a prompt stand for it."""
        return self.rows * self.columns

    def placed(self, start: int, sight: Sight) -> Picture:
        """Return it in a prompt, in place of the tokens from `start` on."""
        return Picture(
            self.pixels, self.digest, start, self.rows, self.columns, is_whole=sight.sees_whole
        )


def see(data: bytes, sight: Sight, *, max_pixels: int, budget: MemoryBudget) -> Seen:
    """Return what a model sees of an image's bytes; raises `ImageRefused`.

    Blocks until the budget has room for the image as it is decoded.
    """
    num_bytes = peak_bytes(data, max_pixels=max_pixels)
    with budget.reserved(num_bytes):
        seen = _seen(decode(data, max_pixels=max_pixels), sight)
        if num_bytes >= _LARGE_BYTES:
            trim_heap()  # else this thread would keep it, beside what the next one decodes
        return seen


def _seen(image: Image.Image, sight: Sight) -> Seen:
    try:
        fit = sight.sizes.fit(image.height, image.width)
    except ValueError as exc:
        raise ImageRefused(f"cannot be seen: {exc}") from exc
    resized = image.resize((fit.width, fit.height), Image.Resampling(sight.filter))
    pixels = np.array(resized)
    digest = blake2b(pixels.tobytes(), digest_size=16, person=f"{fit.height}x{fit.width}".encode())
    return Seen(pixels, digest.digest(), fit.rows, fit.columns)
