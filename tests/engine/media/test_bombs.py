"""Images whose few bytes state little and would take much: refused, within little memory."""

from __future__ import annotations

import struct
import subprocess
import sys
import zlib
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from tidemill.engine.media.avif_header import coded_size
from tidemill.engine.media.codestream import check_codestream
from tidemill.engine.media.image_decoding import decode, peak_bytes
from tidemill.engine.media.image_headers import Damaged, ImageRefused

_ROOMY = 10**6
_DECODE = """
import resource, sys
from pathlib import Path
from tidemill.engine.media.image_decoding import decode, peak_bytes
from tidemill.engine.media.image_headers import ImageRefused
pages = int(Path("/proc/self/statm").read_text().split()[0])
most = pages * resource.getpagesize() + 2**25
resource.setrlimit(resource.RLIMIT_AS, (most, most))
for name in sys.argv[1:]:
    try:
        peak_bytes(Path(name).read_bytes(), max_pixels=2**20)
        decode(Path(name).read_bytes(), max_pixels=2**20)
    except ImageRefused as exc:
        print(exc)
"""


def encoded(image: Image.Image, form: str, **options: object) -> bytearray:
    """Return an image's bytes."""
    buffer = BytesIO()
    image.save(buffer, form, **options)
    return bytearray(buffer.getvalue())


def late_header() -> bytes:
    """Return an ICO of a PNG whose first chunk looks like a small header; it is large."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    side = 6_000
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"aaAa", struct.pack(">2I", 16, 16))
    png += chunk(b"IHDR", struct.pack(">2I5B", side, side, 8, 0, 0, 0, 0))
    png += chunk(b"IDAT", zlib.compress(bytes((side + 1) * side), 9)) + chunk(b"IEND", b"")
    return struct.pack("<3H4B2H2I", 0, 1, 1, 16, 16, 0, 0, 1, 32, len(png), 22) + png


def small_precincts(marker: int = 0x52) -> bytes:
    """Return a codestream with a precinct for each pixel."""
    image = Image.new("L", (1_024, 1_024))
    options = {"no_jp2": True, "num_resolutions": 1, "precinct_size": (128, 128)}
    data = encoded(image, "JPEG2000", **options)
    start = data.index(bytes([0xFF, 0x52]))
    length = int.from_bytes(data[start + 2 : start + 4])
    if marker == 0x52:
        data[start + 14 : start + 2 + length] = bytes(length - 12)
        return bytes(data)
    own = b"\xff\x53" + struct.pack(">H", 10) + b"\0\1" + data[start + 9 : start + 14] + b"\0"
    return bytes(data[: start + 2 + length] + own + data[start + 2 + length :])


def understated_avif(side: int = 2_048, stated: int = 16) -> bytes:
    """Return an AVIF whose container states a smaller image."""
    data = encoded(Image.new("RGB", (side, side)), "AVIF", speed=10)
    start = data.index(b"ispe")
    data[start + 8 : start + 16] = struct.pack(">2I", stated, stated)
    return bytes(data)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of memory")
def test_bombs_are_refused_within_little_memory(tmp_path: Path) -> None:
    """Neither the reservation nor the decoding takes the memory."""
    bombs = [late_header(), small_precincts(), small_precincts(0x53), understated_avif()]
    names = [str(tmp_path / str(number)) for number in range(len(bombs))]
    for name, data in zip(names, bombs, strict=True):
        Path(name).write_bytes(data)
    found = subprocess.run(
        [sys.executable, "-c", "# tests/warm_start.py" + _DECODE, *names],
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line.partition(",")[0] for line in found.stdout.splitlines()] == [
        *["is damaged or truncated"] * 4
    ]


def codestream(**options: object) -> tuple[bytearray, int]:
    """Return a codestream, and where its coding style begins."""
    data = encoded(Image.new("RGB", (64, 64)), "JPEG2000", no_jp2=True, **options)
    return data, data.index(b"\xff\x52")


def test_ordinary_codestreams_are_accepted() -> None:
    """With tiles, layers, precincts and small code-blocks."""
    for options in (
        {},
        {"tile_size": (16, 16)},
        {"quality_layers": [40, 20, 10]},
        {"precinct_size": (64, 64)},
        {"codeblock_size": (16, 16)},
    ):
        data, _ = codestream(**options)
        check_codestream(bytes(data), (64, 64))
        assert decode(bytes(data), max_pixels=_ROOMY).size == (64, 64)


@pytest.mark.parametrize(
    ("place", "value"),
    [(6, b"\xff\xff"), (9, b"\x21"), (10, b"\0"), (11, b"\1"), (2, b"\0\1")],
    ids=["layers", "levels", "width of blocks", "height of blocks", "length"],
)
def test_a_coding_style_of_many_parts_is_damaged(place: int, value: bytes) -> None:
    """Each takes memory."""
    data, start = codestream()
    data[start + place : start + place + len(value)] = value
    with pytest.raises(Damaged):
        check_codestream(bytes(data), (64, 64))


def test_a_coding_style_of_a_tile_is_checked() -> None:
    """The header of a tile's first part may have one."""
    data, start = codestream()
    length = int.from_bytes(data[start + 2 : start + 4])
    style = bytearray(data[start : start + 2 + length])
    style[10:12] = b"\0\0"
    tile = data.index(b"\xff\x90")
    size = int.from_bytes(data[tile + 6 : tile + 10])
    data[tile + 6 : tile + 10] = struct.pack(">I", size + len(style))
    data[tile + 12 : tile + 12] = style
    with pytest.raises(Damaged):
        check_codestream(bytes(data), (64, 64))


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_the_coded_size_of_an_avif_is_its_own(mode: str) -> None:
    """The memory of frames is reserved."""
    data = bytes(encoded(Image.new(mode, (301, 70)), "AVIF"))
    assert coded_size(data) == (301, 70)
    assert peak_bytes(data, max_pixels=_ROOMY) == 301 * 70 * 24


def animated_avif() -> bytearray:
    """Return an animation of three frames; the first is black."""
    frames = [Image.new("RGB", (8, 8), (20 * i, 0, 0)) for i in range(3)]
    return encoded(frames[0], "AVIF", save_all=True, append_images=frames[1:])


def test_the_track_of_an_animated_avif_is_not_read() -> None:
    """A damaged track does not matter, because the decoder gets only the still image."""
    data = animated_avif()
    start = data.index(b"moov")
    data[start + 4 : data.index(b"mdat") - 4] = b"\xff" * (data.index(b"mdat") - 8 - start)
    assert decode(bytes(data), max_pixels=_ROOMY).getpixel((0, 0)) == (0, 0, 0)


def test_an_animated_avif_without_a_still_image_is_refused() -> None:
    """The error names its kind."""
    data = animated_avif().replace(b"meta", b"free", 1)
    with pytest.raises(ImageRefused, match="an animated AVIF without a still image: convert"):
        decode(bytes(data), max_pixels=_ROOMY)
