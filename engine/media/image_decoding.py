"""Image decoding: bytes to pixels, within limits that are checked by the header first.

PNG, JPEG, WebP, GIF (its first frame) and BMP are supported. Images are rotated by their EXIF data,
and transparency becomes white, as in transformers and vLLM.

A few bytes can unfold to a gigabyte: `peak_bytes` computes the memory of decoding from the header.
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

# Measured, and rounded up: the decoder's own memory, the decoded image, and the converted one.
_PEAK_BYTES_PER_PIXEL = {"WEBP": 18}
_OTHER_PEAK_BYTES_PER_PIXEL = 12
_STRIP_ROWS = 256

# Sizes are checked here, before decoding, against Tidemill's limits.
Image.MAX_IMAGE_PIXELS = None
# Pillow's warnings are about a client's bytes, and do not concern an operator.
warnings.filterwarnings("ignore", module=r"PIL\.")


class ImageRefused(Exception):
    """An unreadable image; the message follows the words "the image"."""


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
    """Yield an image after reading its header only; any failure is an `ImageRefused`."""
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as opened:
            _check_size(opened.size, max_pixels)
            yield opened
    except ImageRefused:
        raise
    except UnidentifiedImageError as exc:
        raise ImageRefused(_unknown(data)) from exc
    except Exception as exc:  # malicious bytes may make its decoders fail in any way
        raise ImageRefused("is damaged or truncated") from exc


def _check_size(size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width * height > max_pixels:
        raise ImageRefused(f"has {width:,} x {height:,} pixels: the maximum is {max_pixels:,}")


def _unknown(data: bytes) -> str:
    if not data:
        return "is empty"
    if _SVG.match(data.removeprefix(_BOMS)):
        return "is an SVG, which is not supported: convert it to PNG"
    return "is not a PNG, JPEG, WebP, GIF or BMP"


def _turn_upright(image: Image.Image) -> None:
    """Rotate an image by its EXIF; invalid EXIF is ignored."""
    with suppress(OSError, SyntaxError, ValueError, TypeError, KeyError, struct.error, Warning):
        ImageOps.exif_transpose(image, in_place=True)


def _plain(image: Image.Image) -> Image.Image:
    """Return an image in RGB."""
    if image.mode.startswith("I"):  # 16 bits per pixel; the upper 8 are used
        levels = np.asarray(image).astype(np.uint32) >> 8
        image = Image.fromarray(levels.clip(0, 255).astype(np.uint8))
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        return _on_white(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    """Return an image in RGB on white, in strips, since whole layers would triple its memory."""
    composed = Image.new("RGB", image.size)
    for top in range(0, image.height, _STRIP_ROWS):
        strip = image.crop((0, top, image.width, min(top + _STRIP_ROWS, image.height)))
        white = Image.new("RGBA", strip.size, (255, 255, 255, 255))
        composed.paste(Image.alpha_composite(white, strip.convert("RGBA")), (0, top))
    return composed
