"""PDF pages as images, by PDFium (the extra `pdf`).

PDFium is not thread-safe: one page of one document is read at a time. It runs no scripts, and
fetches nothing. A page is rendered at 150 dots per inch, or fewer if it is large; a page that takes
too long is given up.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from PIL import Image

from .image_headers import ImageRefused

if TYPE_CHECKING:
    from pypdfium2 import PdfDocument, PdfPage

_HEAD_BYTES: Final = 64
_SCALE: Final = 150 / 72
_MAX_PAGE_PIXELS: Final = 8_000_000
_MAX_SECONDS: Final = 30.0
_MAX_OBJECTS: Final = 50_000
_MAX_DEPTH: Final = 8
# Of the page and its copies, and of an image on it that PDFium decodes.
_PEAK_BYTES_PER_PIXEL: Final = 12
_EMBEDDED_BYTES_PER_PIXEL: Final = 8
_WRONG_PASSWORD: Final = 4

_pdfium_lock = Lock()


def is_pdf(data: bytes) -> bool:
    """Say whether data is a PDF."""
    return data[:_HEAD_BYTES].lstrip().startswith(b"%PDF-")


def count_pdf_pages(data: bytes) -> int:
    """Return the number of pages of a PDF; raises `ImageRefused`."""
    with _opened(data) as document:
        return len(document)


def pdf_peak_bytes(data: bytes, page: int, *, max_pixels: int) -> int:
    """Return the peak memory of rendering a page; raises `ImageRefused`."""
    with _page(data, page) as opened:
        width, height, _ = _fit(opened, max_pixels)
        largest = _largest_image(opened)
    if largest > max_pixels:
        raise ImageRefused(
            f"has an image of {largest:,} pixels on page {page + 1}: the maximum is {max_pixels:,}"
        )
    return width * height * _PEAK_BYTES_PER_PIXEL + largest * _EMBEDDED_BYTES_PER_PIXEL


def render_page(data: bytes, page: int, *, max_pixels: int) -> Image.Image:
    """Return a page of a PDF, counted from 0, in RGB on white; raises `ImageRefused`."""
    with _page(data, page) as opened:
        return _rendered(opened, page, max_pixels)


@contextmanager
def _opened(data: bytes) -> Iterator[PdfDocument]:
    """Yield a document while no other one is in use; any failure is an `ImageRefused`."""
    try:
        from pypdfium2 import PdfDocument, PdfiumError
    except ModuleNotFoundError as exc:
        raise ImageRefused("is a PDF, which needs pypdfium2: pip install 'tidemill[pdf]'") from exc
    with _pdfium_lock:
        try:
            with closing(PdfDocument(data)) as document:
                if not len(document):
                    raise ImageRefused("is a PDF without pages")
                yield document
        except PdfiumError as exc:
            if exc.err_code == _WRONG_PASSWORD:
                raise ImageRefused("is an encrypted PDF: remove its password") from exc
            raise ImageRefused("is a damaged PDF") from exc


@contextmanager
def _page(data: bytes, page: int) -> Iterator[PdfPage]:
    with _opened(data) as document, closing(document[page]) as opened:
        yield opened


def _fit(page: PdfPage, max_pixels: int) -> tuple[int, int, float]:
    """Return the width and height in pixels of a rendered page, and its scale."""
    width, height = page.get_size()  # points
    if not (width > 0 and height > 0):
        raise ImageRefused("has a page without a size")
    most = min(max_pixels, _MAX_PAGE_PIXELS)
    scale = min(_SCALE, (most / (width * height)) ** 0.5)
    columns = max(1, min(int(width * scale), most))
    rows = max(1, min(int(height * scale), most // columns))
    return columns, rows, scale


def _largest_image(page: PdfPage) -> int:
    """Return the pixels of the largest image on a page; raises `ImageRefused` for a huge page."""
    from pypdfium2 import raw

    largest = 0
    for number, each in enumerate(page.get_objects(max_depth=_MAX_DEPTH), 1):
        if number > _MAX_OBJECTS:
            raise ImageRefused(f"has a page of more than {_MAX_OBJECTS:,} objects")
        if each.type == raw.FPDF_PAGEOBJ_IMAGE:
            width, height = each.get_px_size()
            largest = max(largest, width * height)
    return largest


def _rendered(page: PdfPage, number: int, max_pixels: int) -> Image.Image:
    from pypdfium2 import PdfBitmap, raw

    width, height, _ = _fit(page, max_pixels)
    with closing(PdfBitmap.new_native(width, height, raw.FPDFBitmap_BGRx)) as bitmap:
        bitmap.fill_rect((255, 255, 255, 255), 0, 0, width, height)
        until = time.monotonic() + _MAX_SECONDS
        pause: Any = raw.IFSDK_PAUSE(version=1)
        is_late = type(pause.NeedToPauseNow)(lambda _: int(time.monotonic() > until))
        pause.NeedToPauseNow = is_late
        status = raw.FPDF_RenderPageBitmap_Start(
            bitmap, page, 0, 0, width, height, 0, raw.FPDF_ANNOT, pause
        )
        raw.FPDF_RenderPage_Close(page)
        if status == raw.FPDF_RENDER_TOBECONTINUED:
            raise ImageRefused(f"takes longer than {_MAX_SECONDS:g} s to render page {number + 1}")
        if status != raw.FPDF_RENDER_DONE:
            raise ImageRefused(f"is damaged on page {number + 1}")
        image: Image.Image = bitmap.to_pil().convert("RGB")
        return image.copy()
