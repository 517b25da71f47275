"""PDF pages as images, rendered by PDFium (the extra `pdf`) in a separate process.

The process is started with the first document. It handles one request at a time, and is replaced
after one that exceeds its limits or ends it.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
from importlib.util import find_spec
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any, Final

from PIL import Image

from ..child_command import module_command
from .image_headers import ImageRefused

_HEAD_BYTES: Final = 64
_MAX_PAGE_PIXELS: Final = 8_000_000
# Of a page and its copies in this process, and the most that the other one allocates.
_PEAK_BYTES_PER_PIXEL: Final = 12
_PROCESS_BYTES: Final = 256 * 2**20
_MAX_CPU_SECONDS: Final = 10
_MAX_SECONDS: Final = 60.0
_MAX_ANSWER_BYTES: Final = 1_000
_INHERITED: Final = frozenset(
    ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
)
"""Environment variables of the process, with those of Python: documents may be hostile."""
_ENDED: Final = "takes too much memory, or is damaged"
_LATE: Final = "takes too much time"


def is_pdf(data: bytes) -> bool:
    """Say whether data is a PDF."""
    return data[:_HEAD_BYTES].lstrip().startswith(b"%PDF-")


def count_pdf_pages(data: bytes) -> int:
    """Return the number of pages of a PDF; raises `ImageRefused`."""
    answer, _ = _process.ask(data, None)
    count = int(answer["pages"])
    if not count:
        raise ImageRefused("is a PDF without pages")
    return count


def pdf_peak_bytes(max_pixels: int) -> int:
    """Return the peak memory of rendering any page."""
    return min(max_pixels, _MAX_PAGE_PIXELS) * _PEAK_BYTES_PER_PIXEL + _PROCESS_BYTES


def render_page(data: bytes, page: int, *, max_pixels: int) -> Image.Image:
    """Return a page of a PDF, counted from 0, in RGB on white; raises `ImageRefused`."""
    most = min(max_pixels, _MAX_PAGE_PIXELS)
    answer, pixels = _process.ask(data, (page, most))
    size = answer["width"], answer["height"]
    return Image.frombytes("RGB", size, pixels, "raw", "BGRX")


class _PdfProcess:
    """The process, started when it is first needed, and again after it has ended."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def ask(self, data: bytes, page: tuple[int, int] | None) -> tuple[dict[str, Any], bytes]:
        """Return the answer to a request, and the pixels of a page; raises `ImageRefused`."""
        if find_spec("pypdfium2") is None:
            raise ImageRefused("is a PDF, which needs pypdfium2: pip install 'tidemill[pdf]'")
        with self._lock:
            connection = self._connection or self._start()
            try:
                connection.send_bytes(json.dumps(page).encode())
                connection.send_bytes(data)
                is_late = not connection.poll(_MAX_SECONDS)
                if not is_late:
                    answer = json.loads(connection.recv_bytes(_MAX_ANSWER_BYTES))
                    most = 4 * page[1] if page is not None else 0
                    pixels = connection.recv_bytes(most) if "width" in answer else b""
            except (EOFError, OSError) as exc:
                is_late = self._end() == -signal.SIGXCPU
                raise ImageRefused(_LATE if is_late else _ENDED) from exc
            except BaseException:
                self._end()
                raise
            if is_late:
                self._end(is_stuck=True)
                raise ImageRefused(_LATE)
        if "refused" in answer:
            raise ImageRefused(answer["refused"])
        return answer, pixels

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        with theirs:
            numbers = (theirs.fileno(), _PROCESS_BYTES, _MAX_CPU_SECONDS)
            self._process = subprocess.Popen(  # noqa: S603 - a module of this package
                module_command("tidemill.engine.media.pdf_process", *map(str, numbers)),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output may contain rows
                env=_environment(),
                start_new_session=True,  # Ctrl-C is for this process
            )
        self._connection = Connection(ours.detach())
        try:
            self._connection.recv_bytes()
        except (EOFError, OSError) as exc:
            self._end()
            raise RuntimeError("the process that reads PDFs could not be started") from exc
        return self._connection

    def _end(self, *, is_stuck: bool = False) -> int | None:
        """End the process, and return its status; a process that ends by itself has its own."""
        status = None
        if self._process is not None and self._connection is not None:
            self._connection.close()
            if is_stuck:
                self._process.kill()
            try:
                status = self._process.wait(1)
            except subprocess.TimeoutExpired:
                self._process.kill()
                status = self._process.wait()
        self._process = self._connection = None
        return status

    def close(self) -> None:
        """End the process, which a later request starts again."""
        with self._lock:
            self._end()


def _environment() -> dict[str, str]:
    """Return the variables that Python needs, without credentials."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in _INHERITED or name.startswith("PYTHON")
    }


_process = _PdfProcess()
atexit.register(_process.close)
