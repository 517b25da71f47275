"""The pass over a file before it leaves this machine: what intake would say, and what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from cli.kinds import Kinds
from engine.batchfile.duplicates import DuplicateFinder
from engine.batchfile.forms import HEAD_BYTES, Form, form_of, open_lines
from engine.batchfile.lines import FormError, Line, read_lines, refuse_endless
from engine.protocol.errors import RequestError
from engine.protocol.requests import check_request
from engine.protocol.routes import CHAT_COMPLETIONS, COMPLETIONS, find_route
from handler.batch.check import (
    NOT_JSON,
    Findings,
    LineChecker,
    Verdict,
    judge,
    refuse,
)
from handler.batch.model import OnInvalidLine
from handler.batch.wire import MAX_LISTED_ERRORS

_SHOWN_BYTES = 2**20
_BYTES_PER_TOKEN = 4
_PROMPTS = (
    *("messages", "prompt", "input"),
    *("query", "queries", "documents", "items", "text_1", "text_2", "data_1", "data_2"),
)
_WRITING = (CHAT_COMPLETIONS, COMPLETIONS)
_LIMITS = ("max_completion_tokens", "max_tokens")


@dataclass(slots=True)
class Report:
    """What a file holds: `verdict` says what is wrong with it, if anything.

    `failing` are lines that belong to a batch and will get an error row: the engine refuses them.
    Tokens are guesses: of the input a quarter of the bytes of what is asked, of recordings none; of
    the output what the requests allow at most, for the `num_unlimited` that name no limit nothing.
    """

    num_bytes: int = 0
    num_lines: int = 0
    verdict: Verdict = field(default_factory=Verdict)
    form: Form = field(default_factory=Form)
    failing: Kinds = field(default_factory=Kinds)
    endpoint: str | None = None
    models: Counter[str] = field(default_factory=Counter)
    endpoints: Counter[str] = field(default_factory=Counter)
    input_tokens: int = 0
    output_tokens: int = 0
    num_unlimited: int = 0

    @property
    def is_hopeless(self) -> bool:
        """Say whether there are lines and none of them could have a good row."""
        return bool(self.failing.count) and self.failing.count == self.endpoints.total()

    def count(self, line: Line) -> None:
        """Take a good line in."""
        try:
            check_request(line.url, line.body, None)
        except RequestError as exc:
            self.failing.add(exc.message, line.number)
        route = find_route(line.url)
        self.endpoints[route.name if route else line.url] += 1
        self.models[str(line.body.get("model") or "")] += 1
        size = sum(_size_of(line.body.get(name)) for name in _PROMPTS)
        self.input_tokens += -(-size // _BYTES_PER_TOKEN)
        if route in _WRITING:
            self._count_output(line)

    @property
    def writes(self) -> bool:
        """Say whether there are lines that ask for tokens of an output."""
        return any(self.endpoints[route.name] for route in _WRITING)

    def _count_output(self, line: Line) -> None:
        limits = (line.body.get(name) for name in _LIMITS)
        limit = next((value for value in limits if isinstance(value, int)), None)
        if limit is None:
            self.num_unlimited += 1
        else:
            number = line.body.get("n")
            self.output_tokens += limit * (number if isinstance(number, int) else 1)


class _Watched:
    """A file that tells how far it has been read and gives up on lines without end."""

    def __init__(self, file: IO[bytes], show: Callable[[int], object]) -> None:
        self._file = file
        self._show = show
        self._number = 1
        self._length = 0
        self._unshown = 0

    def seek(self, position: int, /) -> int:
        """Go to a byte of the file."""
        return self._file.seek(position)

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes; none at the end."""
        data = self._file.read(size)
        self._count(data)
        return data

    def readline(self, size: int, /) -> bytes:
        r"""Return the bytes up to and with the next `\n`, at most `size`; none at the end."""
        data = self._file.readline(size)
        self._count(data)
        self._length += len(data)
        if data.endswith(b"\n"):
            self._number += 1
            self._length = 0
        refuse_endless(self._number, self._length)
        return data

    def _count(self, data: bytes) -> None:
        self._unshown += len(data)
        if self._unshown >= _SHOWN_BYTES or not data:
            self._show(self._unshown)
            self._unshown = 0


def form_in(file: IO[bytes]) -> Form:
    """Return the form of a file; for one that cannot be taken, which is told later, a plain one."""
    try:
        return _form_in(file)
    except FormError:
        return Form()


def _form_in(file: IO[bytes]) -> Form:
    file.seek(0)
    return form_of(file.read(HEAD_BYTES))


def check_file(
    file: IO[bytes],
    *,
    models: Mapping[str, str] | None,
    on_invalid_line: OnInvalidLine,
    show: Callable[[int], object] = lambda _: None,
) -> Report:
    """Read a file once, from its start, and return what is in it; memory stays flat.

    `models` are those that are served, by each name that lines may use, None where nobody has said;
    `show` is told of bytes read.
    """
    report = Report()
    findings = Findings()
    try:
        report.form = _form_in(file)
        with DuplicateFinder() as finder:
            checker = LineChecker(findings, models=models, endpoint=None, add_id=finder.add)
            for raw in read_lines(open_lines(report.form, _Watched(file, show))):
                if (line := checker.check(raw)) is not None:
                    report.count(line)
            report.verdict = judge(
                findings,
                finder.find(MAX_LISTED_ERRORS),
                mistake=report.form.suspicion,
                on_invalid_line=on_invalid_line,
                unit=report.form.unit,
            )
    except FormError as exc:
        report.verdict = refuse(NOT_JSON, exc.message)
    report.num_bytes = file.tell()
    report.num_lines, report.endpoint = findings.num_rows, findings.endpoint
    return report


def _size_of(value: Any) -> int:
    """Return the bytes of all text in what is asked; a token id counts as one token."""
    if isinstance(value, str):
        return len(value.encode("utf-8", "replace"))
    if isinstance(value, list):
        return sum(_size_of(item) for item in value)
    if isinstance(value, dict):
        return sum(_size_of(value[name]) for name in ("content", "text") if name in value)
    return _BYTES_PER_TOKEN if isinstance(value, int) else 0
