"""Process that reads PDFs by PDFium, within limits of its memory and of its time for a request.

A small document may take any time and memory, and PDFium has no limits. It runs no
scripts, and fetches nothing.
"""

from __future__ import annotations

import json
import resource
import sys
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from pypdfium2 import PdfBitmap, PdfDocument, PdfiumError, raw

_SCALE: Final = 150 / 72
_WRONG_PASSWORD: Final = 4


class _Refused(Exception):
    """The message follows the words "the image"."""


def serve(connection: Connection, max_bytes: int, max_seconds: int) -> None:
    """Answer requests until the other end is closed, each in at most `max_seconds` of CPU time.

    A request has two messages: the number of a page and the most pixels of its image, in JSON, or
    null to count the pages; and the document. An answer is a JSON object, and the pixels of a page
    (BGRx, [height, width, 4]) after it.
    """
    _limit_memory(max_bytes)
    connection.send_bytes(b"{}")
    while True:
        page = json.loads(connection.recv_bytes())
        document = connection.recv_bytes()
        _limit_time(max_seconds)
        try:
            if page is None:
                _answer(connection, pages=_count(document))
            else:
                number, max_pixels = page
                _render(connection, document, number, max_pixels)
        except _Refused as exc:
            _answer(connection, refused=str(exc))
        except PdfiumError as exc:
            is_locked = exc.err_code == _WRONG_PASSWORD
            reason = "is an encrypted PDF: remove its password" if is_locked else "is a damaged PDF"
            _answer(connection, refused=reason)


def _answer(connection: Connection, **values: Any) -> None:
    connection.send_bytes(json.dumps(values).encode())


def _count(data: bytes) -> int:
    with closing(PdfDocument(data)) as document:
        return len(document)


def _render(connection: Connection, data: bytes, number: int, max_pixels: int) -> None:
    """Send a page, counted from 0, on white at 150 dots per inch, or fewer if it is large."""
    with closing(PdfDocument(data)) as document, closing(document[number]) as page:
        width, height = _fit(page.get_size(), max_pixels)
        with closing(PdfBitmap.new_native(width, height, raw.FPDFBitmap_BGRx)) as bitmap:
            bitmap.fill_rect((255, 255, 255, 255), 0, 0, width, height)
            raw.FPDF_RenderPageBitmap(bitmap, page, 0, 0, width, height, 0, raw.FPDF_ANNOT)
            _answer(connection, width=width, height=height)
            connection.send_bytes(memoryview(bitmap.buffer).cast("B"))


def _fit(points: tuple[float, float], max_pixels: int) -> tuple[int, int]:
    """Return the width and height in pixels of a page that has these in points."""
    width, height = points
    if not (width > 0 and height > 0):
        raise _Refused("has a page without a size")
    scale = min(_SCALE, (max_pixels / (width * height)) ** 0.5)
    columns = max(1, min(int(width * scale), max_pixels))
    return columns, max(1, min(int(height * scale), max_pixels // columns))


def _limit_memory(max_bytes: int) -> None:
    """Limit the memory that is allocated from now on."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError):  # not on macOS
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
        most = pages * resource.getpagesize() + max_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _limit_time(max_seconds: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + max_seconds
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, hard))


if __name__ == "__main__":
    with suppress(EOFError, OSError, MemoryError):
        serve(Connection(int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]))
