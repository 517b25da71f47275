"""Image resize: an image at the size that the model requires, with a digest for caching."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tidemill.protocol.in_flight import MemoryBudget

from ..heap_trim import trim_heap
from ..scheduling.images import Fit, ImageForm, ImageSpec, ImageTiling
from .image_decoding import decode, peak_bytes
from .image_headers import ImageRefused

_LARGE_BYTES = 64 * 2**20
# Of an image that would have more pixels only the crop is computed. Pillow may then begin with the
# other axis, so that a few levels differ by rounding.
_MOST_RESIZED_PIXELS = 2**24


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


def decode_and_resize(
    data: bytes,
    form: ImageSpec | ImageForm,
    *,
    max_pixels: int,
    budget: MemoryBudget,
    page: int = 0,
) -> ResizedImage:
    """Return a page of an image decoded and resized for a model; raises `ImageRefused`.

    Blocks until the memory budget has room for the decoded image.
    """
    num_bytes = peak_bytes(data, max_pixels=max_pixels, page=page)
    with budget.reserve(num_bytes):
        resized = _resized(decode(data, max_pixels=max_pixels, page=page), form)
        if num_bytes >= _LARGE_BYTES:
            trim_heap()  # otherwise this thread's arena would retain it during the next image
        return resized


def _resized(image: Image.Image, form: ImageSpec | ImageForm) -> ResizedImage:
    try:
        fit = form.sizes.fit(image.height, image.width)
    except ValueError as exc:
        raise ImageRefused(f"cannot be resized for this model: {exc}") from exc
    resampling = Image.Resampling(form.filter)
    if form.tiling is not None:
        resized = _tiled(image, form.tiling, resampling)
    elif form.crop is None:
        resized = image.resize((fit.width, fit.height), resampling)
    else:
        resized = _cropped(image, fit, form.crop, resampling)
    pixels = np.array(resized)
    size = f"{resized.height}x{resized.width}".encode()
    digest = blake2b(pixels.tobytes(), digest_size=16, person=size).digest()
    return ResizedImage(pixels, digest, fit.rows, fit.columns)


def _tiled(image: Image.Image, tiling: ImageTiling, resampling: Image.Resampling) -> Image.Image:
    """Return the tiles of an image in one column, row by row; the last of several is the whole."""
    side, (rows, columns) = tiling.side, tiling.grid(image.height, image.width)
    whole = image.resize((columns * side, rows * side), resampling)
    if rows * columns == 1:
        return whole
    corners = [(x * side, y * side) for y in range(rows) for x in range(columns)]
    tiles = [whole.crop((x, y, x + side, y + side)) for x, y in corners]
    tiles.append(image.resize((side, side), resampling))
    column = Image.new(image.mode, (side, side * len(tiles)))
    for index, tile in enumerate(tiles):
        column.paste(tile, (0, index * side))
    return column


def _cropped(image: Image.Image, fit: Fit, side: int, resampling: Image.Resampling) -> Image.Image:
    """Return the central square of `side` pixels of a resized image."""
    left, top = (fit.width - side) // 2, (fit.height - side) // 2
    if fit.width * fit.height <= _MOST_RESIZED_PIXELS:
        whole = image.resize((fit.width, fit.height), resampling)
        return whole.crop((left, top, left + side, top + side))
    across, down = image.width / fit.width, image.height / fit.height
    box = (left * across, top * down, (left + side) * across, (top + side) * down)
    return image.resize((side, side), resampling, box=box)
