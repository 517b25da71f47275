"""File check before an upload: intake's verdict, and a token estimate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Any

from pydantic import BaseModel
from pydantic_core import to_json

from tidemill.batch.batch_object import MAX_LISTED_ERRORS
from tidemill.batch.file.duplicate_ids import DuplicateFinder
from tidemill.batch.file.expected_tokens import BYTES_A_TOKEN, max_output_tokens
from tidemill.batch.file.formats import FileFormat, detect_file, open_lines
from tidemill.batch.file.lines import FormatError, Line, check_line_length, read_lines
from tidemill.batch.file.unknown_parameters import UnknownParameters
from tidemill.batch.file.vendor_lines import own_error
from tidemill.batch.model import OnInvalidLine
from tidemill.batch.validation import (
    NOT_JSON,
    Findings,
    LineChecker,
    Verdict,
    judge,
    refuse,
)
from tidemill.offline.console.error_summary import ErrorSummary
from tidemill.protocol.constraints.request import asks_for_automaton
from tidemill.protocol.errors import RequestError
from tidemill.protocol.requests import PROMPT_FIELDS, check_request
from tidemill.protocol.routes import CHAT_COMPLETIONS, COMPLETIONS, RESPONSES, find_route

if TYPE_CHECKING:
    from tidemill.engine.structured_output.constraint_check import ConstraintCheck

COMPILER = "llguidance"
_MORE_NAMES = (
    "Use one of these, or add a name: with `aliases` in a deployment's configuration, or with "
    "`tidemill serve --served-model-name`."
)
# Fields of messages, and of a decision's items, with text that the model reads.
_TEXT_FIELDS = (
    *("content", "text", "output", "arguments"),
    *("instructions", "choices", "levels", "value", "label", "description"),  # of questions
)
_SHOWN_BYTES = 2**20
_WRITING = (CHAT_COMPLETIONS, RESPONSES, COMPLETIONS)


@dataclass(slots=True)
class FileReport:
    """Contents of a file; `verdict` holds its errors.

    `failing` are valid lines whose request the engine will reject with an error row. Token counts
    are estimates: a quarter of the prompts' bytes, without audio, and the sum of the output limits;
    `num_unlimited` requests have no limit.
    `unknown` parameters are ignored. The constraints of `num_uncompiled` lines were not compiled:
    the compiler is not installed, or took too long.
    """

    num_bytes: int = 0
    num_lines: int = 0
    verdict: Verdict = field(default_factory=Verdict)
    form: FileFormat = field(default_factory=FileFormat)
    failing: ErrorSummary = field(default_factory=ErrorSummary)
    endpoint: str | None = None
    models: Counter[str] = field(default_factory=Counter)
    endpoints: Counter[str] = field(default_factory=Counter)
    input_tokens: int = 0
    output_tokens: int = 0
    num_unlimited: int = 0
    unknown: UnknownParameters = field(default_factory=UnknownParameters)
    num_uncompiled: int = 0
    _constraints: ConstraintCheck | None = None

    @property
    def is_hopeless(self) -> bool:
        """Return whether the file has lines and all of them will fail."""
        return bool(self.failing.count) and self.failing.count == self.endpoints.total()

    def count(self, line: Line, data: bytes) -> None:
        """Count a valid line, which is these bytes."""
        try:
            request = check_request(line.url, line.body, None)
            if asks_for_automaton(line.body):
                self._compile(request)
        except RequestError as exc:
            self.failing.add(own_error({"message": exc.message}, data)["message"], line.number)
        route = find_route(line.url)
        self.endpoints[route.name if route else line.url] += 1
        self.models[str(line.body.get("model") or "")] += 1
        size = sum(_size_of(line.body.get(name)) for name in (*PROMPT_FIELDS, "questions"))
        if "questions" in line.body:
            size += _json_size(line.body.get("state"))
        self.input_tokens += -(-size // BYTES_A_TOKEN)
        most = max_output_tokens(line.url, line.body) if route in _WRITING else 0
        self.num_unlimited += most is None
        self.output_tokens += most or 0

    def _compile(self, request: BaseModel) -> None:
        """Compile the constraints of a request; raises the `RequestError` of the engine."""
        if not has_compiler():
            self.num_uncompiled += 1
            return
        if self._constraints is None:
            # A late import: few files have constraints.
            from tidemill.engine.structured_output.constraint_check import ConstraintCheck

            self._constraints = ConstraintCheck()
        try:
            self._constraints.check(request)
        finally:
            self.num_uncompiled = self._constraints.num_unchecked

    @property
    def writes(self) -> bool:
        """Return whether any line generates tokens."""
        return any(self.endpoints[route.name] for route in _WRITING)


@cache
def has_compiler() -> bool:
    """Return whether the constraint compiler is installed; the base package does not include it."""
    return find_spec(COMPILER) is not None


class _ProgressReader:
    """File wrapper that reports progress and rejects overlong lines."""

    def __init__(self, file: IO[bytes], show: Callable[[int], object]) -> None:
        self._file = file
        self._show = show
        self._number = 1
        self._length = 0
        self._unshown = 0

    def seek(self, position: int, /) -> int:
        """Seek to a byte offset."""
        return self._file.seek(position)

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes; none at the end."""
        data = self._file.read(size)
        self._count(data)
        return data

    def readline(self, size: int, /) -> bytes:
        r"""Return the bytes up to and including the next `\n`, at most `size`; none at the end."""
        data = self._file.readline(size)
        self._count(data)
        self._length += len(data)
        if data.endswith(b"\n"):
            self._number += 1
            self._length = 0
        check_line_length(self._number, self._length)
        return data

    def _count(self, data: bytes) -> None:
        self._unshown += len(data)
        if self._unshown >= _SHOWN_BYTES or not data:
            self._show(self._unshown)
            self._unshown = 0


def form_in(file: IO[bytes]) -> FileFormat:
    """Return the format of a file; JSONL if it is invalid, which the check reports later."""
    try:
        return detect_file(file)
    except FormatError:
        return FileFormat()


def check_file(
    file: IO[bytes],
    *,
    models: Mapping[str, str] | None,
    on_invalid_line: OnInvalidLine,
    strict_parameters: bool = False,
    form: FileFormat | None = None,
    show: Callable[[int], object] = lambda _: None,
) -> FileReport:
    """Read a file once, from its start, and return a report; memory stays flat.

    `models` maps the names that requests may use to served models; None means unknown. `show` gets
    the number of bytes of each read, and `form` is the file's format if it is known.
    """
    findings = Findings()
    report = FileReport(unknown=findings.unknown)
    try:
        report.form = detect_file(file) if form is None else form
        with DuplicateFinder() as finder:
            checker = LineChecker(
                findings,
                models=models,
                endpoint=None,
                add_id=finder.add,
                more_names=_MORE_NAMES,
            )
            for raw in read_lines(open_lines(report.form, _ProgressReader(file, show))):
                if (line := checker.check(raw)) is not None:
                    report.count(line, raw.data)
            report.verdict = judge(
                findings,
                finder.find(MAX_LISTED_ERRORS),
                mistake=report.form.suspicion,
                on_invalid_line=on_invalid_line,
                strict_parameters=strict_parameters,
                unit=report.form.unit,
            )
    except FormatError as exc:
        report.verdict = refuse(NOT_JSON, exc.message)
    report.num_bytes = file.tell()
    report.num_lines, report.endpoint = findings.num_rows, findings.endpoint
    return report


def _size_of(value: Any) -> int:
    """Return the bytes of all text in a prompt; a token id counts as one token."""
    if isinstance(value, str):
        return len(value.encode("utf-8", "replace"))
    if isinstance(value, list):
        return sum(_size_of(item) for item in value)
    if isinstance(value, dict):
        return sum(_size_of(value[name]) for name in _TEXT_FIELDS if name in value)
    return BYTES_A_TOKEN if isinstance(value, int) else 0


def _json_size(value: object) -> int:
    """Return the bytes of an object or list that a model reads as JSON."""
    return len(to_json(value)) if isinstance(value, (dict, list)) else 0
