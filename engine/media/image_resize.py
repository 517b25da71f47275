"""Image resize: an image at the size that the model requires, with a digest for caching."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tidemill.protocol.in_flight import MemoryBudget

from ..heap_trim import trim_heap
from ..scheduling.images import ImageSpec, PromptImage
from .image_decoding import decode, peak_bytes
from .image_headers import ImageRefused

_LARGE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, eq=False)
class ResizedImage:
    """An image as `rows` and `columns` of tokens; images with equal `digest` are the same."""

    pixels: NDArray[np.uint8]  # [H, W, 3]
    digest: bytes
    rows: int
    columns: int

    @property
    def num_tokens(self) -> int:
        """Return the number of its placeholder tokens in a prompt."""
        return self.rows * self.columns

    def at(self, start: int, image_spec: ImageSpec) -> PromptImage:
        """Return the image for a prompt whose placeholder tokens begin at `start`."""
        return image_spec.prompt_image(self.pixels, self.digest, start, self.rows, self.columns)


def decode_and_resize(
    data: bytes, image_spec: ImageSpec, *, max_pixels: int, budget: MemoryBudget, page: int = 0
) -> ResizedImage:
    """Return a page of an image decoded and resized for a model; raises `ImageRefused`.

    Blocks until the memory budget has room for the decoded image.
    """
    num_bytes = peak_bytes(data, max_pixels=max_pixels, page=page)
    with budget.reserve(num_bytes):
        resized = _resized(decode(data, max_pixels=max_pixels, page=page), image_spec)
        if num_bytes >= _LARGE_BYTES:
            trim_heap()  # otherwise this thread's arena would retain it during the next image
        return resized


def _resized(image: Image.Image, image_spec: ImageSpec) -> ResizedImage:
    try:
        fit = image_spec.sizes.fit(image.height, image.width)
    except ValueError as exc:
        raise ImageRefused(f"cannot be resized for this model: {exc}") from exc
    resized = image.resize((fit.width, fit.height), Image.Resampling(image_spec.filter))
    pixels = np.array(resized)
    digest = blake2b(pixels.tobytes(), digest_size=16, person=f"{fit.height}x{fit.width}".encode())
    return ResizedImage(pixels, digest.digest(), fit.rows, fit.columns)
