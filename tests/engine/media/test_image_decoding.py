"""Decoding of images: every format, upright and in RGB, and images rejected unopened."""

from __future__ import annotations

import random
import struct
import zlib
from contextlib import suppress
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tidemill.engine.media.image_decoding import ImageRefused, decode, peak_bytes

ROOMY = 2**20


def ramp(mode: str = "RGB") -> Image.Image:
    """Return a small image whose corners differ."""
    levels = np.arange(6 * 4 * 3, dtype=np.uint8).reshape(4, 6, 3) * 3
    return Image.fromarray(levels).convert(mode)


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    """Return an image's bytes."""
    buffer = BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def pixels(data: bytes) -> np.ndarray[Any, Any]:
    """Return the decoded pixels."""
    image = decode(data, max_pixels=ROOMY)
    assert image.mode == "RGB"
    return np.asarray(image)


@pytest.mark.parametrize(
    ("form", "options"),
    [("PNG", {}), ("BMP", {}), ("WEBP", {"lossless": True}), ("JPEG", {"quality": 100})],
)
def test_formats_are_read_by_their_bytes(form: str, options: dict[str, Any]) -> None:
    """The pixels are equal, except for one lossy format."""
    got = pixels(encoded(ramp(), form, **options)).astype(int)
    assert np.abs(got - np.asarray(ramp())).max() <= (12 if form == "JPEG" else 0)


@pytest.mark.parametrize("form", ["GIF", "WEBP"])
def test_the_first_picture_of_an_animation_is_used(form: str) -> None:
    """The others are not even decoded."""
    first, second = Image.new("RGB", (8, 8), (255, 0, 0)), Image.new("RGB", (8, 8), (0, 0, 255))
    options = {"lossless": True} if form == "WEBP" else {}
    data = encoded(first, form, save_all=True, append_images=[second], **options)
    assert pixels(data)[4, 4].tolist() == [255, 0, 0]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_rotated_by_its_exif(orientation: int) -> None:
    """Viewers do the same."""
    upright = np.asarray(ramp())
    lying = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright),
        7: upright[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(np.ascontiguousarray(lying)), "PNG", exif=exif)
    assert np.array_equal(pixels(data), upright)


def test_an_unreadable_exif_rotates_nothing() -> None:
    """The image is used as stored."""
    data = encoded(ramp(), "PNG", exif=b"Exif\x00\x00MM\x00*\x00\x00\xff\xff")
    assert np.array_equal(pixels(data), np.asarray(ramp()))


def test_transparent_pixels_become_white() -> None:
    """They may be fully or partly transparent, or a color of a palette."""
    see_through = Image.new("RGBA", (2, 1), (0, 0, 200, 0))
    see_through.putpixel((1, 0), (0, 0, 0, 128))
    assert pixels(encoded(see_through, "PNG"))[0].tolist() == [[255] * 3, [127] * 3]
    grey = Image.new("LA", (1, 1), (9, 0))
    assert pixels(encoded(grey, "PNG"))[0, 0].tolist() == [255] * 3
    palette = Image.new("P", (1, 1), 3)
    palette.putpalette(list(range(12)))
    assert pixels(encoded(palette, "PNG", transparency=3))[0, 0].tolist() == [255] * 3
    assert pixels(encoded(palette, "PNG"))[0, 0].tolist() == [9, 10, 11]


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGBA"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    """The conversion is Pillow's."""
    image = ramp(mode)
    assert np.array_equal(pixels(encoded(image, "PNG")), np.asarray(image.convert("RGB")))


def test_the_upper_eight_of_sixteen_bits_are_used() -> None:
    """Pillow would clip all bright values."""
    levels = np.array([[0, 255, 256, 0x8000, 0xFFFF]], np.uint16)
    got = pixels(encoded(Image.fromarray(levels), "PNG"))
    assert got[0, :, 0].tolist() == [0, 0, 1, 128, 255]


def test_the_size_is_checked_before_the_pixels() -> None:
    """A file whose header states a large size is rejected, regardless of its data."""
    header = struct.pack(">IIBBBBB", 2**31 - 1, 2**31 - 1, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + header
    data = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk
    data += struct.pack(">I", zlib.crc32(chunk)) + struct.pack(">I", 9) + b"IDAT"
    with pytest.raises(ImageRefused, match="2,147,483,647 x 2,147,483,647 pixels"):
        decode(data, max_pixels=ROOMY)
    whole = encoded(ramp(), "PNG")
    assert decode(whole, max_pixels=24).size == (6, 4)
    with pytest.raises(ImageRefused, match="maximum is 23"):
        decode(whole, max_pixels=23)


@pytest.mark.parametrize(
    "text",
    [
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b'\xef\xbb\xbf<?xml version="1.0"?><svg/>',
        b"  <!-- drawn --> <svg/>",
        b"<!DOCTYPE svg PUBLIC><svg/>",
    ],
)
def test_an_svg_is_rejected_by_name(text: bytes) -> None:
    """It has no pixels, and may refer to files and scripts."""
    with pytest.raises(ImageRefused, match="an SVG"):
        decode(text, max_pixels=ROOMY)


@pytest.mark.parametrize("data", [b"", b"hello", b"\x00" * 100, b"<html></html>", b"%PDF-1.7"])
def test_data_that_is_not_an_image_is_rejected(data: bytes) -> None:
    """The message lists the supported formats."""
    with pytest.raises(ImageRefused, match=r"is empty|is not a PNG"):
        decode(data, max_pixels=ROOMY)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_damaged_images_raise_no_other_error(form: str) -> None:
    """A truncated or changed image is decoded or rejected."""
    rng = random.Random(0)
    whole = encoded(ramp(), form)
    for _ in range(150):
        data = bytearray(whole[: rng.randint(1, len(whole))])
        for _ in range(rng.randint(0, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with suppress(ImageRefused):
            assert decode(bytes(data), max_pixels=ROOMY).mode == "RGB"


def test_the_memory_of_decoding_is_known_before_it() -> None:
    """It comes from the header: a few bytes may be millions of pixels."""
    small, large = Image.new("RGB", (8, 8)), Image.new("RGB", (2_000, 2_000))
    data = encoded(large, "WEBP", lossless=True)
    assert len(data) < 1_000
    assert peak_bytes(data, max_pixels=2**22) >= 16 * 2_000 * 2_000
    assert peak_bytes(encoded(small, "PNG"), max_pixels=ROOMY) < 1_000
    with pytest.raises(ImageRefused, match="the maximum is 1,000,000"):
        peak_bytes(data, max_pixels=10**6)
    with pytest.raises(ImageRefused, match="is empty"):
        peak_bytes(b"", max_pixels=ROOMY)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_an_image_on_white_is_the_same_in_strips(mode: str) -> None:
    """All pixels are equal, with an incomplete last strip."""
    levels = np.random.default_rng(1).integers(0, 256, (600, 5, 4), dtype=np.uint8)
    image = Image.fromarray(levels).convert(mode)
    options = {"transparency": 7} if mode == "P" else {}
    data = encoded(image, "PNG", **options)
    reopened = Image.open(BytesIO(data)).convert("RGBA")
    white = Image.new("RGBA", reopened.size, (255, 255, 255, 255))
    expected = Image.alpha_composite(white, reopened).convert("RGB")
    assert np.array_equal(pixels(data), np.asarray(expected))
