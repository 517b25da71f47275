"""Image decoding: bytes to pixels, within limits that are checked by the header first.

PNG, JPEG, WebP, GIF, BMP, TIFF (each page), AVIF, JPEG 2000, ICO (the largest image) and pages of a
PDF are supported. An animation is read as its first frame. Images are rotated by their EXIF data,
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

from .avif_header import coded_size, still_avif
from .codestream import check_codestream
from .image_headers import (
    Damaged,
    ImageRefused,
    check_tile,
    icon_size,
    is_icon,
    is_tiff,
    looks_like_tiff,
    page_directories,
)
from .pdf import count_pdf_pages, is_pdf, pdf_peak_bytes, render_page

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "ICO")
_FORMATS = "PNG, JPEG, WebP, GIF, BMP, TIFF, AVIF, JPEG 2000 or ICO"
_SVG = re.compile(rb"\s*(<\?xml|<!--|<!DOCTYPE\s+svg|<svg)", re.IGNORECASE)
_BOMS = b"\xef\xbb\xbf"

# Measured, and rounded up: the decoder's own memory, the decoded image, and the converted one.
_PEAK_BYTES_PER_PIXEL = {"WEBP": 18, "AVIF": 24, "JPEG2000": 40}
_OTHER_PEAK_BYTES_PER_PIXEL = 12
_STRIP_ROWS = 256
_DAMAGED = "is damaged or truncated"
_NO_STILL = "is damaged, or of a kind of AVIF or HEIF that is not supported: convert it to PNG"
_MAX_EXIF_BYTES = 2**16
_WIDE_MODES = ("F", "I")

# Sizes are checked here, before decoding, against Tidemill's limits.
Image.MAX_IMAGE_PIXELS = None
# Pillow's warnings are about a client's bytes, and do not concern an operator.
warnings.filterwarnings("ignore", module=r"PIL\.")


def may_have_pages(head: bytes) -> bool:
    """Say whether data that begins with these 64 bytes may have several pages."""
    return is_tiff(head) or is_pdf(head)


def count_images(data: bytes, limit: int) -> int:
    """Return the number of images in data, the pages of a TIFF or PDF; raises `ImageRefused`.

    It is at most `limit` + 1. Nothing is decoded.
    """
    if is_pdf(data):
        return min(count_pdf_pages(data), limit + 1)
    try:
        return len(page_directories(data, limit)) if is_tiff(data) else 1
    except Damaged as exc:
        raise ImageRefused(_DAMAGED) from exc


def peak_bytes(data: bytes, *, max_pixels: int, page: int = 0) -> int:
    """Return the peak memory of decoding a page of an image; raises `ImageRefused`."""
    if is_pdf(data):
        return pdf_peak_bytes(max_pixels)
    if is_icon(data):  # which Pillow decodes when it is opened
        width, height = _checked_icon_size(data, max_pixels)
        return width * height * _OTHER_PEAK_BYTES_PER_PIXEL
    data = still_avif(data)
    with _opened(data, max_pixels, page) as image:
        # Frames of some encoders may be larger than the image, up to powers of two.
        width, height = image.size
        if image.format == "AVIF":
            width, height = map(max, image.size, _avif_size(data))
        per_pixel = _PEAK_BYTES_PER_PIXEL.get(image.format or "", _OTHER_PEAK_BYTES_PER_PIXEL)
        return width * height * per_pixel


def decode(data: bytes, *, max_pixels: int, page: int = 0) -> Image.Image:
    """Return a page of an image, counted from 0, upright and in RGB; raises `ImageRefused`."""
    if is_pdf(data):
        return render_page(data, page, max_pixels=max_pixels)
    with _opened(still_avif(data), max_pixels, page) as image:
        image.load()
        _check_size(image.size, max_pixels)
        _turn_upright(image)
        return _plain(image)


@contextmanager
def _opened(data: bytes, max_pixels: int, page: int) -> Iterator[Image.Image]:
    """Yield an image after reading its header only; any failure is an `ImageRefused`."""
    try:
        directory = 0
        if looks_like_tiff(data):
            directory = page_directories(data, page)[page]
        elif data[4:8] == b"ftyp":
            _avif_size(data)
        elif is_icon(data):
            _checked_icon_size(data, max_pixels)
        with Image.open(BytesIO(data), formats=FORMATS) as opened:
            if directory:
                opened.seek(directory)
            _check_size(opened.size, max_pixels)
            _check_content(opened, data, max_pixels)
            yield opened
    except ImageRefused:
        raise
    except UnidentifiedImageError as exc:
        raise ImageRefused(_unknown(data)) from exc
    except Exception as exc:  # malicious bytes may make its decoders fail in any way
        raise ImageRefused(_DAMAGED) from exc


def _check_content(image: Image.Image, data: bytes, max_pixels: int) -> None:
    """Raise for an image that is larger than its file states, or has unsupported samples."""
    match image.format:
        case "AVIF":
            (width, height), (coded_width, coded_height) = image.size, _avif_size(data)
            if coded_width >= 2 * width or coded_height >= 2 * height:
                raise Damaged
        case "JPEG2000":
            check_codestream(data, image.size)
        case "TIFF":
            check_tile(getattr(image, "tag_v2", None), max_pixels)
            if image.mode in _WIDE_MODES:
                raise ImageRefused("has 32 bits per sample: convert it to 8 or 16")


def _checked_icon_size(data: bytes, max_pixels: int) -> tuple[int, int]:
    """Return the size of the largest image in an ICO; raises `ImageRefused`."""
    try:
        size = icon_size(data)
    except Damaged as exc:
        raise ImageRefused(_DAMAGED) from exc
    _check_size(size, max_pixels)
    return size


def _avif_size(data: bytes) -> tuple[int, int]:
    """Return the largest coded size in an AVIF; raises `ImageRefused`."""
    try:
        return coded_size(data)
    except Damaged as exc:
        raise ImageRefused(_NO_STILL) from exc


def _check_size(size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width * height > max_pixels:
        raise ImageRefused(f"has {width:,} x {height:,} pixels: the maximum is {max_pixels:,}")


def _unknown(data: bytes) -> str:
    if not data:
        return "is empty"
    if _SVG.match(data.removeprefix(_BOMS)):
        return "is an SVG, which is not supported: convert it to PNG"
    return f"is not a {_FORMATS}"


def _turn_upright(image: Image.Image) -> None:
    """Rotate an image by its EXIF; invalid EXIF is ignored."""
    if len(image.info.get("exif", b"")) > _MAX_EXIF_BYTES:  # each entry copies its bytes
        return
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
