"""An image's bytes to its pixels, within bounds: what a file says of itself is looked at first.

PNG, JPEG, WebP, GIF (its first picture) and BMP. Upright as its EXIF says, what is transparent on
white, as transformers and vLLM have it.
"""

from __future__ import annotations

import re
import struct
import warnings
from io import BytesIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_SVG = re.compile(rb"\s*(<\?xml|<!--|<!DOCTYPE\s+svg|<svg)", re.IGNORECASE)
_BOMS = b"\xef\xbb\xbf"

# Sizes are looked at here, before anything is unfolded, and held to other bounds than Pillow's.
Image.MAX_IMAGE_PIXELS = None
# What it warns of is in a client's bytes, and no news for whoever runs this.
warnings.filterwarnings("ignore", module=r"PIL\.")


class ImageRefused(Exception):
    """These bytes are no image that can be taken; the words follow "the image"."""


def decode(data: bytes, *, max_pixels: int) -> Image.Image:
    """Return an image upright and in RGB; raises `ImageRefused`."""
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as opened:
            _check_size(opened.size, max_pixels)
            opened.load()
            return _plain(_upright(opened))
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


def _upright(image: Image.Image) -> Image.Image:
    """Turn an image as its EXIF says; what that says in no known way is no reason to refuse it."""
    try:
        return ImageOps.exif_transpose(image)
    except (OSError, SyntaxError, ValueError, TypeError, KeyError, struct.error, Warning):
        return image


def _plain(image: Image.Image) -> Image.Image:
    """Return an image in RGB."""
    if image.mode.startswith("I"):  # 16 bits a pixel, of which the upper 8 are kept
        levels = np.asarray(image).astype(np.uint32) >> 8
        image = Image.fromarray(levels.clip(0, 255).astype(np.uint8))
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")
