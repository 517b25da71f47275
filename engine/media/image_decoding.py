"""Image decoding: bytes to pixels, within limits that are checked by the header first.

PNG, JPEG, WebP, GIF (its first frame) and BMP. Rotated by EXIF, transparency on white, as in
transformers and vLLM.

A few bytes can unfold to a gigabyte: `peak_bytes` returns from the header how much decoding takes.
"""

from __future__ import annotations

import re
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_SVG = re.compile(rb"\s*(<\?xml|<!--|<!DOCTYPE\s+svg|<svg)", re.IGNORECASE)
_BOMS = b"\xef\xbb\xbf"

# Measured, and rounded up: the decoder's own, the decoded image, and the one made of it.
_PEAK_BYTES_PER_PIXEL = {"WEBP": 18}
_OTHER_PEAK_BYTES_PER_PIXEL = 12
_STRIP_ROWS = 256

# Sizes are checked here, before anything is decoded, against limits of our own.
Image.MAX_IMAGE_PIXELS = None
# Its warnings are about a client's bytes, no news for an operator.
warnings.filterwarnings("ignore", module=r"PIL\.")


class ImageRefused(Exception):
    """An image that cannot be read; the message follows the words "the image"."""


def peak_bytes(data: bytes, *, max_pixels: int) -> int:
    """Return the peak memory of decoding an image; raises `ImageRefused`."""
    with _opened(data, max_pixels) as image:
        width, height = image.size
        per_pixel = _PEAK_BYTES_PER_PIXEL.get(image.format or "", _OTHER_PEAK_BYTES_PER_PIXEL)
        return width * height * per_pixel


def decode(data: bytes, *, max_pixels: int) -> Image.Image:
    """Return an image upright and in RGB; raises `ImageRefused`."""
    with _opened(data, max_pixels) as image:
        image.load()
        _turn_upright(image)
        return _plain(image)


@contextmanager
def _opened(data: bytes, max_pixels: int) -> Iterator[Image.Image]:
    """Yield an image of which only the header is read; any failure is an `ImageRefused`."""
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as opened:
            _check_size(opened.size, max_pixels)
            yield opened
    except ImageRefused:
        raise
    except UnidentifiedImageError as exc:
        raise ImageRefused(_unknown(data)) from exc
    except Exception as exc:  # its decoders may fail in any way at bytes that are made for it
        raise ImageRefused("is broken, or was cut off") from exc


def _check_size(size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width * height > max_pixels:
        raise ImageRefused(
            f"has {width:,} x {height:,} pixels: no more than {max_pixels:,} are taken"
        )


def _unknown(data: bytes) -> str:
    if not data:
        return "is empty"
    if _SVG.match(data.removeprefix(_BOMS)):
        return "is an SVG, which has no pixels: draw it as a PNG"
    return "is no PNG, JPEG, WebP, GIF or BMP"


def _turn_upright(image: Image.Image) -> None:
    """Rotate an image by its EXIF; invalid EXIF is no reason to refuse it."""
    with suppress(OSError, SyntaxError, ValueError, TypeError, KeyError, struct.error, Warning):
        ImageOps.exif_transpose(image, in_place=True)


def _plain(image: Image.Image) -> Image.Image:
    """Return an image in RGB."""
    if image.mode.startswith("I"):  # 16 bits a pixel, of which the upper 8 are kept
        levels = np.asarray(image).astype(np.uint32) >> 8
        image = Image.fromarray(levels.clip(0, 255).astype(np.uint8))
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        return _on_white(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    """Return an image in RGB on white, composed in strips: whole layers would triple its memory."""
    composed = Image.new("RGB", image.size)
    for top in range(0, image.height, _STRIP_ROWS):
        strip = image.crop((0, top, image.width, min(top + _STRIP_ROWS, image.height)))
        white = Image.new("RGBA", strip.size, (255, 255, 255, 255))
        composed.paste(Image.alpha_composite(white, strip.convert("RGBA")), (0, top))
    return composed
