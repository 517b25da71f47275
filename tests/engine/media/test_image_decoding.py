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
from PIL import Image, TiffImagePlugin

from tidemill.engine.media.image_decoding import (
    FORMATS,
    count_images,
    decode,
    peak_bytes,
)
from tidemill.engine.media.image_headers import ImageRefused

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
    [
        ("PNG", {}),
        ("BMP", {}),
        ("WEBP", {"lossless": True}),
        ("JPEG", {"quality": 100}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw", "big_tiff": True}),
        ("AVIF", {"quality": 100, "subsampling": "4:4:4"}),
        ("JPEG2000", {}),
        ("JPEG2000", {"no_jp2": True}),
        ("ICO", {"sizes": [(6, 4)]}),
    ],
)
def test_formats_are_read_by_their_bytes(form: str, options: dict[str, Any]) -> None:
    """The pixels are equal, except for lossy formats."""
    got = pixels(encoded(ramp(), form, **options)).astype(int)
    assert np.abs(got - np.asarray(ramp())).max() <= (12 if form in ("JPEG", "AVIF") else 0)


@pytest.mark.parametrize("form", ["GIF", "WEBP", "AVIF"])
def test_the_first_picture_of_an_animation_is_used(form: str) -> None:
    """The others are not even decoded."""
    first, second = Image.new("RGB", (8, 8), (255, 0, 0)), Image.new("RGB", (8, 8), (0, 0, 255))
    options = {"lossless": True} if form == "WEBP" else {}
    data = encoded(first, form, save_all=True, append_images=[second], **options)
    assert np.abs(pixels(data)[4, 4].astype(int) - [255, 0, 0]).max() <= (form == "AVIF")
    assert peak_bytes(data, max_pixels=ROOMY) >= 12 * 8 * 8


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_rotated_by_its_exif(orientation: int, form: str) -> None:
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
    data = encoded(Image.fromarray(np.ascontiguousarray(lying)), form, exif=exif)
    assert np.array_equal(pixels(data), upright)


def test_a_long_exif_rotates_nothing() -> None:
    """Its entries may repeat the same bytes without end."""
    exif = Image.Exif()
    exif[0x0112], exif[0x927C] = 6, b"x" * 2**16
    data = encoded(ramp(), "PNG", exif=exif)
    assert np.array_equal(pixels(data), np.asarray(ramp()))


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


@pytest.mark.parametrize("form", ["PNG", "TIFF", "JPEG2000"])
def test_the_upper_eight_of_sixteen_bits_are_used(form: str) -> None:
    """Pillow would clip all bright values."""
    levels = np.array([[0, 255, 256, 0x8000, 0xFFFF]], np.uint16)
    got = pixels(encoded(Image.fromarray(levels), form))
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


@pytest.mark.parametrize("data", [b"", b"hello", b"\x00" * 100, b"<html></html>"])
def test_data_that_is_not_an_image_is_rejected(data: bytes) -> None:
    """The message lists the supported formats."""
    with pytest.raises(ImageRefused, match=r"is empty|is not a PNG"):
        decode(data, max_pixels=ROOMY)


@pytest.mark.parametrize("form", FORMATS)
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


def test_transparency_of_other_formats_becomes_white() -> None:
    """Alpha is a channel of each."""
    clear = Image.new("RGBA", (8, 8), (0, 0, 200, 0))
    for form in ("TIFF", "AVIF", "JPEG2000", "ICO"):
        options: dict[str, Any] = {"sizes": [(8, 8)]} if form == "ICO" else {}
        assert pixels(encoded(clear, form, **options))[4, 4].tolist() == [255] * 3


def pages(count: int, **options: Any) -> bytes:
    """Return a TIFF whose pages have different sizes and shades."""
    first, *others = (Image.new("L", (4 + i, 3), 20 * i) for i in range(count))
    return encoded(first, "TIFF", save_all=True, append_images=others, **options)


@pytest.mark.parametrize("big_tiff", [False, True])
def test_pages_of_a_tiff_are_separate_images(big_tiff: bool) -> None:  # noqa: FBT001
    """They are counted without being decoded."""
    data = pages(5, big_tiff=big_tiff)
    assert count_images(data, 9) == 5
    assert count_images(data, 3) == 4
    assert count_images(encoded(ramp(), "PNG"), 9) == 1
    for page in range(5):
        image = decode(data, max_pixels=ROOMY, page=page)
        assert image.size == (4 + page, 3)
        assert image.getpixel((0, 0)) == (20 * page,) * 3
    with pytest.raises(ImageRefused, match="8 x 3 pixels: the maximum is 20"):
        decode(data, max_pixels=20, page=4)


def directories(count: int, entry: bytes = struct.pack("<HHII", 0x100, 3, 1, 1)) -> bytes:
    """Return a TIFF of directories with one entry each."""
    data = b"II*\0" + struct.pack("<I", 8)
    for i in range(count):
        following = 0 if i == count - 1 else len(data) + 18
        data += struct.pack("<H", 1) + entry + struct.pack("<I", following)
    return data


def test_ten_thousand_pages_are_not_read() -> None:
    """Counting ends above the limit; a loop of directories has an end, too."""
    data = directories(10_000)
    assert count_images(data, 16) == 17
    assert count_images(data, 20_000) == 10_000
    loop = bytearray(directories(2))
    loop[-4:] = struct.pack("<I", 8)
    assert count_images(bytes(loop), 99) == 2


@pytest.mark.parametrize(
    "data",
    [
        directories(1, struct.pack("<HHII", 0x9999, 1, 2**31, 8)),
        directories(1, struct.pack("<HHII", 0x9999, 12, 9, 8)),
        b"II*\0" + struct.pack("<IH", 8, 65_535) + bytes(65_535 * 12),
        b"II*\0",
        b"MM*\0" + bytes(40),
        b"II\0*" + bytes(40),
    ],
)
def test_directories_that_would_fill_the_memory_are_rejected(data: bytes) -> None:
    """Their values are longer than the file, or their header is not valid."""
    with pytest.raises(ImageRefused, match="is damaged or truncated"):
        decode(data, max_pixels=ROOMY)


def test_the_tiles_of_a_tiff_are_not_larger_than_images() -> None:
    """A decoder would allocate a whole tile."""
    tags = {256: 6, 257: 4, 258: 8, 259: 1, 262: 1, 322: 2**15, 323: 2**15, 324: 8, 325: 9}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    data = b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4)
    with pytest.raises(ImageRefused, match="damaged"):
        peak_bytes(data, max_pixels=ROOMY)


@pytest.mark.parametrize("kind", ["float32", "int32"])
def test_wide_samples_are_refused(kind: str) -> None:
    """Their range is unknown."""
    with pytest.raises(ImageRefused, match="32 bits per sample"):
        decode(encoded(Image.fromarray(np.ones((3, 4), kind)), "TIFF"), max_pixels=ROOMY)


def test_the_image_in_an_icon_is_checked() -> None:
    """The directory of an ICO may state a smaller one."""
    png = encoded(Image.new("RGB", (2_000, 1_000)), "PNG")
    data = struct.pack("<3H4B2H2I", 0, 1, 1, 16, 16, 0, 0, 1, 32, len(png), 22) + png
    with pytest.raises(ImageRefused, match="2,000 x 1,000 pixels"):
        peak_bytes(data, max_pixels=ROOMY)
    assert peak_bytes(data, max_pixels=2**21) >= 8 * 2_000_000
    largest = encoded(Image.new("RGB", (64, 64), (9, 9, 9)), "ICO", sizes=[(16, 16), (48, 48)])
    assert decode(largest, max_pixels=ROOMY).size == (48, 48)


@pytest.mark.parametrize("no_jp2", [False, True])
@pytest.mark.parametrize("field", ["size", "tiles", "channels"])
def test_a_codestream_has_the_stated_size(field: str, no_jp2: bool) -> None:  # noqa: FBT001
    """A decoder would allocate the memory of what the codestream states."""
    data = bytearray(encoded(ramp(), "JPEG2000", no_jp2=no_jp2))
    start = data.index(b"\xff\x4f\xff\x51")
    if field == "size":
        data[start + 8 : start + 12] = struct.pack(">I", 2**20)
    elif field == "tiles":
        data[start + 8 : start + 16] = struct.pack(">2I", 1_000, 1_000)
        data[start + 24 : start + 32] = struct.pack(">2I", 1, 1)
        box = data.find(b"ihdr")
        if box > 0:
            data[box + 4 : box + 12] = struct.pack(">2I", 1_000, 1_000)
    else:
        data[start + 40 : start + 42] = struct.pack(">H", 9)
    with pytest.raises(ImageRefused, match=r"damaged|not a PNG|the maximum is"):
        decode(bytes(data), max_pixels=ROOMY)


@pytest.mark.parametrize("kind", [1, 4])
@pytest.mark.parametrize("big_tiff", [False, True])
def test_thumbnails_and_masks_are_skipped(big_tiff: bool, kind: int) -> None:  # noqa: FBT001
    """Cameras and scanners add them between the pages."""
    buffer = BytesIO()
    with TiffImagePlugin.AppendingTiffWriter(buffer, new=True) as writer:
        for number, subfile in enumerate([kind, 0, kind, 2]):
            page = Image.new("L", (4 + number, 3), 20 * number)
            page.save(writer, "TIFF", tiffinfo={254: subfile})
            writer.newFrame()
    data = buffer.getvalue() if not big_tiff else pages(2, big_tiff=True, tiffinfo={254: 2})
    assert count_images(data, 9) == 2
    widths = [decode(data, max_pixels=ROOMY, page=page).width for page in range(2)]
    assert widths == ([4, 5] if big_tiff else [5, 7])
    only = encoded(ramp(), "TIFF", tiffinfo={254: kind})
    assert count_images(only, 9) == 1
    assert decode(only, max_pixels=ROOMY).size == (6, 4)
