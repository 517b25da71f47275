"""PDF pages as images: sizes and colors, documents that are refused, and limits of each page."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from random import Random
from typing import Any

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


def test_the_process_has_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads hostile documents, and gets only the variables that Python needs."""
    given: list[dict[str, str]] = []
    start = subprocess.Popen

    def note(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        given.append(options["env"])
        return start(*arguments, **options)

    monkeypatch.setattr(pdf.subprocess, "Popen", note)
    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "PYTHONHASHSEED"):
        monkeypatch.setenv(name, "1")
    process = pdf._PdfProcess()
    try:
        answer, _ = process.ask(pages(1), None)
    finally:
        process.close()
    assert answer == {"pages": 1}
    [environment] = given
    assert "PATH" in environment
    assert environment["PYTHONHASHSEED"] == "1"
    assert not environment.keys() & {"AWS_SECRET_ACCESS_KEY", "HF_TOKEN"}


def compressed(data: bytes, entries: bytes = b"") -> bytes:
    """Return a stream."""
    packed = zlib.compress(data, 9)
    head = b"<<%s/Filter/FlateDecode/Length %d>>" % (entries, len(packed))
    return b"%sstream\n%s\nendstream" % (head, packed)


def of_objects(*objects: bytes) -> bytes:
    """Return a PDF of one page, whose objects from 4 on are given."""
    fixed = (
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        *objects,
    )
    body = b"".join(b"%d 0 obj%s endobj\n" % numbered for numbered in enumerate(fixed, 1))
    return b"%PDF-1.4\n" + body + b"trailer<</Root 1 0 R>>\n%%EOF"


def nested_forms(depth: int) -> bytes:
    """Return a page of forms, each of which draws the next one ten times."""
    page = b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]/Contents 4 0 R/Resources%s>>"
    resources, content = b"<</XObject<</F %d 0 R>>>>", b"/F Do\n" * 10
    objects = [page % (resources % 5), compressed(content)]
    for following in range(6, 6 + depth):
        entries = b"/Type/XObject/Subtype/Form/BBox[0 0 9 9]/Resources" + resources % following
        objects.append(compressed(content, entries))
    return of_objects(*objects)


def repeated_content() -> bytes:
    """Return a page of 60 times 20 MB of commands."""
    page = b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]/Contents[%s]>>" % (b"4 0 R " * 60)
    return of_objects(page, compressed(b" " * 20_000_000))


def slow_page() -> bytes:
    """Return a page that is filled twenty thousand times."""
    return document(b"0 0 2000 2000 re f\n" * 20_000, box="0 0 2000 2000")


@contextmanager
def fresh_process() -> Iterator[None]:
    """Let other settings apply to a separate process."""
    pdf._process.close()
    try:
        yield
    finally:
        pdf._process.close()


@pytest.fixture(name="pdfium", scope="module")
def fixture_pdfium() -> Iterator[None]:
    """Skip tests without PDFium."""
    pytest.importorskip("pypdfium2")
    yield
    pdf._process.close()


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

    def test_pages_are_counted_and_rendered_one_by_one(self) -> None:
        """The count is bounded by the limit."""
        data = pages(5)
        assert [count_images(data, limit) for limit in (3, 4, 9)] == [4, 5, 5]
        for page in (4, 0, 2):
            color = decode(data, max_pixels=ROOMY, page=page).getpixel((20, 20))
            assert isinstance(color, tuple)
            red, green, blue = color
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
        """Its process is ended, and another one renders the next page."""
        monkeypatch.setattr(pdf, "_MAX_CPU_SECONDS", 1)
        with fresh_process(), pytest.raises(ImageRefused, match="takes too much time"):
            decode(slow_page(), max_pixels=ROOMY)
        assert decode(document(RED_LEFT), max_pixels=ROOMY).getpixel((5, 5)) == (255, 0, 0)

    def test_a_process_that_does_not_answer_is_ended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It may wait without using CPU time."""
        monkeypatch.setattr(pdf, "_MAX_SECONDS", 0.01)
        with fresh_process(), pytest.raises(ImageRefused, match="takes too much time"):
            decode(slow_page(), max_pixels=ROOMY)

    @pytest.mark.parametrize("kind", ["forms", "content"])
    def test_a_page_that_takes_too_much_memory_is_refused(
        self, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A few bytes unfold to any number of objects; this process allocates nothing of it."""
        data = nested_forms(7) if kind == "forms" else repeated_content()
        assert len(data) < 30_000
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        monkeypatch.setattr(pdf, "_PROCESS_BYTES", 48 * 2**20)
        with fresh_process(), pytest.raises(ImageRefused, match="too much memory"):
            decode(data, max_pixels=ROOMY)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 2**10
        assert decode(document(RED_LEFT), max_pixels=ROOMY).getpixel((5, 5)) == (255, 0, 0)

    def test_memory_of_both_processes_is_reserved(self) -> None:
        """The other one allocates at most that much."""
        assert peak_bytes(document(b""), max_pixels=ROOMY) >= pdf._PROCESS_BYTES + 8_000_000 * 8

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
