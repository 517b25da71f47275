"""Validation of a file: each of its lines, and the file as a whole.

It does no I/O. `Findings` has everything known about the lines so far, so that another run can
continue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from tidemill.protocol.errors import ModelNotFound, RequestError
from tidemill.protocol.names import ANY_MODEL, own_names
from tidemill.protocol.routes import UNKNOWN_URL, known_route
from tidemill.protocol.stream import STREAM_MODE, STREAM_NOT_SUPPORTED, is_stream
from tidemill.protocol.validation import printable

from .allowed_media import AllowedMedia, may_name_object
from .batch_object import MAX_LISTED_ERRORS
from .file.duplicate_ids import Duplicates
from .file.expected_tokens import NO_TOKENS, ExpectedTokens, expected_tokens
from .file.lines import INVALID_METHOD, METHOD, Line, LineError, RawLine, parse_line
from .file.unknown_parameters import UnknownParameters
from .model import BatchError, OnInvalidLine

NOT_JSON = "invalid_json_line"
UNKNOWN_PARAMETER = "unknown_parameter"

_MAX_SHOWN_CHARS = 100

_MAX_CACHED_CHARS = 256
_route_of_short = lru_cache(maxsize=64)(known_route)


@dataclass(slots=True)
class Findings:
    """Findings of the lines so far: rows to come, the file's model, and errors.

    `model` and `endpoint` come from the first line with a served one. `errors` has the first ones;
    all are counted. `expected` sums the tokens of all lines with a body. `unknown` parameters are
    not errors: lines run without them.
    """

    num_rows: int = 0
    model: str | None = None
    endpoint: str | None = None
    num_errors: int = 0
    errors: list[BatchError] = field(default_factory=list)
    expected: ExpectedTokens = NO_TOKENS
    unknown: UnknownParameters = field(default_factory=UnknownParameters)


class LineChecker:
    """Checks the lines of a file one after another and adds to the findings.

    `models` are the served ones by each name that lines may use, None if unknown; `endpoint` is the
    one that every line must have, if any; `add_id` gets each custom ID with its line. `more_names`
    is a sentence for the error of an unknown model, with the way to give a model more names.
    `media` are the objects in S3 that lines may name; None leaves them to the engine.
    """

    def __init__(
        self,
        findings: Findings,
        *,
        models: Mapping[str, str] | None,
        endpoint: str | None,
        add_id: Callable[[str, int], None],
        more_names: str = "",
        media: AllowedMedia | None = None,
    ) -> None:
        self._findings = findings
        self._models = models
        # An alias `*` has the model of every other name.
        self._any_model = (models or {}).get(ANY_MODEL)
        all_models = set((models or {}).values())
        self._only_model = all_models.pop() if len(all_models) == 1 else None
        self._endpoint = endpoint
        self._add_id = add_id
        self._more_names = more_names
        self._media = media

    def check(self, raw: RawLine) -> Line | None:
        """Check the next line that is not blank; return its request if it is valid."""
        self._findings.num_rows += 1
        good: Line | None = None
        try:
            line = parse_line(raw)
            custom_id: str | None = line.custom_id
            self._findings.expected += expected_tokens(line.url, line.body, len(raw.data))
            self._findings.unknown.add(line.url, line.body, line.number)
            if line.method != METHOD:
                message = f'`method` must be "{METHOD}", not {line.method[:40]!r}'
                raise _wrong(line, INVALID_METHOD, "method", message)
            self._check_url(line)
            self._check_model(line)
            if "stream" in line.body and is_stream(line.body):
                raise _wrong(line, STREAM_NOT_SUPPORTED, "body.stream", STREAM_MODE)
            if self._media is not None and (b"3:" in raw.data or b"\\u00" in raw.data):
                self._check_media(self._media, raw, line)
            good = line
        except LineError as exc:
            custom_id = exc.custom_id
            self._note(exc)
        if custom_id is not None:
            self._add_id(custom_id, raw.number)
        return good

    def _check_url(self, line: Line) -> None:
        # Long URLs are not cached: one may be as long as a line.
        is_short = len(line.url) <= _MAX_CACHED_CHARS
        try:
            route = _route_of_short(line.url) if is_short else known_route(line.url)
        except RequestError as exc:
            raise _wrong(line, UNKNOWN_URL, "url", exc.message) from exc
        if self._findings.endpoint is None:
            self._findings.endpoint = route.name
        if self._endpoint not in {None, route.name}:
            message = f"`url` is {_quoted(line.url)}, but the batch's endpoint is {self._endpoint}"
            raise _wrong(line, "url_mismatch", "url", message)

    def _check_model(self, line: Line) -> None:
        name = line.body.get("model")
        if name is None and self._only_model is not None:
            name = self._only_model
        elif name is None and self._models is None:
            return  # valid if only one model is served
        elif not isinstance(name, str):
            words = "is required" if name is None else "must be a string"
            message = f"`model` {words}. {self._served()}"
            raise _wrong(line, "missing_required_parameter", "body.model", message)
        model = name if self._models is None else self._models.get(name) or self._any_model
        if model is None:
            error = ModelNotFound(printable(name, _MAX_SHOWN_CHARS), sorted(self._models or ()))
            message = f"{error.message} {self._more_names}".rstrip()
            raise _wrong(line, error.code, "body.model", message)
        if self._findings.model is None:
            self._findings.model = model
        if model != self._findings.model:
            message = (
                f"the model is {_quoted(model)}, but earlier lines use "
                f"{_quoted(self._findings.model)}: make one file per model"
            )
            raise _wrong(line, "model_mismatch", "body.model", message)

    def _check_media(self, allowed: AllowedMedia, raw: RawLine, line: Line) -> None:
        error = allowed.find_error(line.body) if may_name_object(raw.data) else None
        if error is not None:
            raise _wrong(line, error.code, f"body.{error.param}", error.message)

    def _served(self) -> str:
        if self._models is None:
            return "Use the name of a served model."
        return f"Served: {', '.join(own_names(sorted(self._models))) or 'none'}."

    def _note(self, error: LineError) -> None:
        self._findings.num_errors += 1
        if len(self._findings.errors) < MAX_LISTED_ERRORS:
            self._findings.errors.append(
                BatchError(error.code, error.message, error.param, error.line)
            )


@dataclass(frozen=True, slots=True)
class Verdict:
    """Validation result of a whole file: `num_errors` errors, of which some are listed.

    Errors are in line order; if some are not listed, the last entry has their number.
    """

    num_errors: int = 0
    errors: tuple[BatchError, ...] = ()


def judge(
    findings: Findings,
    duplicates: Duplicates,
    *,
    mistake: str | None,
    on_invalid_line: OnInvalidLine,
    strict_parameters: bool = False,
    unit: str = "line",
) -> Verdict:
    """Return the verdict on a file whose lines, each called a `unit`, have all been checked.

    `mistake` describes its beginning, and is the error if no line is a request. With `skip` only
    repeated IDs count, unless no line has a served model. With `strict_parameters` each unknown
    parameter is an error.
    """
    if findings.num_rows == 0:
        return refuse("empty_file", "The file has no lines: write one request per line.")
    if findings.endpoint is None and mistake is not None:
        return refuse(NOT_JSON, mistake, findings.num_errors)
    if on_invalid_line == "fail" or findings.model is None:
        listed, num_errors = list(findings.errors), findings.num_errors
    else:
        listed, num_errors = [], 0
    listed += [
        BatchError(
            "duplicate_custom_id",
            f"`custom_id` is already used in {unit} {repeated.first_line:,}",
            "custom_id",
            repeated.line,
        )
        for repeated in duplicates.first
    ]
    num_errors += duplicates.count
    if strict_parameters:
        unknown = findings.unknown.most_frequent(MAX_LISTED_ERRORS)
        listed += [
            BatchError(
                UNKNOWN_PARAMETER,
                each.sentence(unit, names_first=False),
                f"body.{each.name}",
                each.first_line,
            )
            for each in unknown
        ]
        num_errors += len(unknown)
    listed = sorted(listed, key=lambda error: error.line or 0)[:MAX_LISTED_ERRORS]
    if num_errors > len(listed):
        message = f"{num_errors - len(listed):,} more errors are not listed."
        listed.append(BatchError("more_errors", message))
    return Verdict(num_errors, tuple(listed))


def refuse(code: str, message: str, num_errors: int = 1) -> Verdict:
    """Return the verdict on a file that is invalid as a whole."""
    return Verdict(num_errors, (BatchError(code, message),))


def _wrong(line: Line, code: str, param: str, message: str) -> LineError:
    return LineError(message, line=line.number, code=code, param=param, custom_id=line.custom_id)


def _quoted(value: str) -> str:
    return repr(value[:_MAX_SHOWN_CHARS])
