"""PDF pages as images: sizes and colors, documents that are refused, and limits of each page."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from io import BytesIO
from random import Random

import pytest
from PIL import Image

from tidemill.engine.media import pdf
from tidemill.engine.media.image_decoding import count_images, decode, peak_bytes
from tidemill.engine.media.image_headers import ImageRefused

ROOMY = 10**7


def document(content: bytes, *, box: str = "0 0 144 72", more: bytes = b"") -> bytes:
    """Return a PDF of one page with drawing commands; PDFium finds its objects itself."""
    page = f"3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[{box}]/Contents 4 0 R>>endobj\n".encode()
    return (
        b"%PDF-1.4\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\n"
        b"2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj\n"
        + page
        + b"4 0 obj<</Length %d>>stream\n%s\nendstream endobj\n" % (len(content), content)
        + b"trailer<</Root 1 0 R%s>>\n%%%%EOF" % more
    )


RED_LEFT = b"1 0 0 rg 0 0 72 72 re f"
ENCRYPTED = b"/Encrypt<</Filter/Standard/V 1/R 2/O<%s>/U<%s>/P -4>>/ID[<00><00>]" % (
    b"11" * 32,
    b"22" * 32,
)


def pages(count: int) -> bytes:
    """Return a PDF of pages in shades of grey."""
    first, *others = (Image.new("L", (72, 36), 40 * i) for i in range(count))
    buffer = BytesIO()
    first.save(buffer, "PDF", save_all=True, append_images=others)
    return buffer.getvalue()


def test_without_pdfium_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other formats need nothing more."""
    monkeypatch.setitem(sys.modules, "pypdfium2", None)
    with pytest.raises(ImageRefused, match=r"pip install 'tidemill\[pdf\]'"):
        count_images(document(b""), 9)


@pytest.fixture(name="pdfium", scope="module")
def fixture_pdfium() -> None:
    """Skip tests without PDFium."""
    pytest.importorskip("pypdfium2")


@pytest.mark.usefixtures("pdfium")
class TestPages:
    """Tests that render pages."""

    def test_a_page_is_rendered_on_white_at_150_dots_per_inch(self) -> None:
        """One point is 1/72 inch."""
        data = b"\n" + document(RED_LEFT)
        assert count_images(data, 9) == 1
        image = decode(data, max_pixels=ROOMY)
        assert (image.mode, image.size) == ("RGB", (300, 150))
        assert image.getpixel((20, 75)) == (255, 0, 0)
        assert image.getpixel((280, 75)) == (255, 255, 255)
        assert peak_bytes(data, max_pixels=ROOMY) >= 300 * 150 * 8

    def test_pages_are_counted_and_rendered_one_by_one(self) -> None:
        """The count is bounded by the limit."""
        data = pages(5)
        assert [count_images(data, limit) for limit in (3, 4, 9)] == [4, 5, 5]
        for page in (4, 0, 2):
            red, green, blue = decode(data, max_pixels=ROOMY, page=page).getpixel((20, 20))
            assert red == green == blue
            assert abs(red - 40 * page) <= 3

    @pytest.mark.parametrize("box", ["0 0 14400 14400", "0 0 200000 2", "0 0 1e9 1e9", "0 0 0 0"])
    def test_large_pages_have_fewer_dots(self, box: str) -> None:
        """No page exceeds the limit of pixels."""
        image = decode(document(RED_LEFT, box=box), max_pixels=10_000)
        assert 0 < image.width * image.height <= 10_000

    def test_documents_that_cannot_be_opened_are_refused(self) -> None:
        """The message contains the reason."""
        cases = {
            "is an encrypted PDF: remove its password": document(b"", more=ENCRYPTED),
            "is a damaged PDF": b"%PDF-1.7",
        }
        for words, data in cases.items():
            with pytest.raises(ImageRefused, match=words):
                decode(data, max_pixels=ROOMY)

    def test_a_page_that_takes_too_long_is_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Others are rendered afterwards."""
        slow = document(b"1 0 0 rg 0 0 99 99 re f\n" * 2_000)
        monkeypatch.setattr(pdf, "_MAX_SECONDS", -1.0)
        with pytest.raises(ImageRefused, match="to render page 1"):
            decode(slow, max_pixels=ROOMY)
        monkeypatch.undo()
        assert decode(slow, max_pixels=ROOMY).getpixel((5, 5)) == (255, 0, 0)

    def test_a_page_of_many_objects_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each takes memory and time."""
        monkeypatch.setattr(pdf, "_MAX_OBJECTS", 9)
        with pytest.raises(ImageRefused, match="more than 9 objects"):
            peak_bytes(document(b"0 0 9 9 re f\n" * 10), max_pixels=ROOMY)

    def test_an_image_on_a_page_is_not_larger_than_others(self) -> None:
        """PDFium decodes it at its full size."""
        with pytest.raises(ImageRefused, match="an image of 2,592 pixels on page 1"):
            peak_bytes(pages(1), max_pixels=2_000)

    def test_damaged_documents_raise_no_other_error(self) -> None:
        """A truncated or changed document is rendered or refused."""
        rng, whole = Random(0), pages(2)
        for _ in range(60):
            data = bytearray(whole[: rng.randint(200, len(whole))])
            for _ in range(rng.randint(0, 9)):
                data[rng.randrange(20, len(data))] = rng.randrange(256)
            with suppress(ImageRefused):
                peak_bytes(bytes(data), max_pixels=ROOMY)
                decode(bytes(data), max_pixels=ROOMY)

    def test_threads_take_turns(self) -> None:
        """PDFium is not thread-safe."""
        data, results = pages(4), list[int]()

        def render(page: int) -> None:
            for _ in range(5):
                results.append(decode(data, max_pixels=ROOMY, page=page).width)

        threads = [threading.Thread(target=render, args=(page,)) for page in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [150] * 20
