"""Input check: one pass over the whole input before a model is loaded."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tidemill.batch.file.duplicate_ids import DuplicateFinder, Duplicates
from tidemill.batch.file.lines import (
    EXAMPLE_LINE,
    PLACES_MARK,
    Line,
    LineError,
    RawLine,
    line_of,
    parse_fields,
    parse_line,
)
from tidemill.batch.file.unknown_parameters import UnknownParameters, sentences
from tidemill.protocol.errors import ModelNotFound, RequestError
from tidemill.protocol.names import own_names
from tidemill.protocol.requests import check_request
from tidemill.protocol.routes import DECISIONS, ENDPOINTS, SYSTEM_ONE

from ..arguments.defaults import Defaults
from ..console.error_summary import ErrorSummary, sentences_by_line
from ..console.errors import BadInput
from ..console.terminal import amount, log, without_control_chars
from ..plan.body_form import BodyForm, BodyForms
from ..plan.line_index import LineIndex
from ..plan.line_pattern import LinePattern, find_pattern
from .input_file import InputFile

MAX_NAMED = 100
DECISION_URLS = (DECISIONS.name, SYSTEM_ONE.name)

_NO_DEFAULTS = Defaults()
_MAX_NAMED_DUPLICATES = 5
_MAX_NAMED_MODELS = 5
_MAX_MODELS = 1_000
_MAX_NAME_CHARS = 100
_LINES_PER_CLOCK = 10_000
_SECONDS_PER_WORD = 5.0


@dataclass(slots=True)
class InputReport:
    """Findings of the check; `num_rows` lines get a row.

    `num_bad` lines are malformed: `bad` has the numbers and messages of the first ones, `malformed`
    the counts by kind. `failing` are requests that the engine will reject; `models` counts the
    requested model names that are not served. `without_effect` counts, for each default flag, the
    lines without such a parameter, and `kinds` counts requests by URL and model. `others_run` is
    set if no line of this shard can run, but a line of another shard can. `unknown` are unknown
    parameters.
    """

    requests: InputFile
    served_names: tuple[str, ...]
    adapters: tuple[str, ...] = ()
    num_rows: int = 0
    num_bad: int = 0
    bad: list[tuple[int, str]] = field(default_factory=list)
    malformed: ErrorSummary = field(default_factory=ErrorSummary)
    lacks_parts: bool = False
    failing: ErrorSummary = field(default_factory=ErrorSummary)
    models: Counter[str] = field(default_factory=Counter)
    duplicates: Duplicates = field(default_factory=lambda: Duplicates(0, ()))
    without_effect: Counter[str] = field(default_factory=Counter)
    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    others_run: bool = False
    unknown: UnknownParameters = field(default_factory=UnknownParameters)

    @property
    def name(self) -> str:
        """Return the display name of the input."""
        return self.requests.name

    @property
    def unit(self) -> str:
        """Return the unit of its numbers, such as `line`."""
        return self.requests.form.unit

    @property
    def is_hopeless(self) -> bool:
        """Return whether there are lines, but none of them can run."""
        return 0 < self.num_rows <= self.failing.count + self.num_bad

    def add_malformed(self, error: LineError) -> None:
        """Count a line that is not a request."""
        self.num_bad += 1
        self.malformed.add(error.message, error.line)
        self.lacks_parts |= error.code == "missing_required_parameter"
        if len(self.bad) < MAX_NAMED:
            # Not the exception, which references its line.
            self.bad.append((error.line, error.message))

    def add_failing(self, error: RequestError, body: Mapping[str, Any], number: int) -> None:
        """Count a request that the engine will reject."""
        self.failing.add(error.message, number)
        if isinstance(error, ModelNotFound) and len(self.models) < _MAX_MODELS:
            self.models[body["model"][:_MAX_NAME_CHARS]] += 1

    def add_request(self, number: int, url: str, body: Mapping[str, Any], form: BodyForm) -> None:
        """Count the kind of a request and its unknown parameters.

        Beyond a limit, new kinds are not counted.
        """
        kind = url, form.model
        if kind in self.kinds or len(self.kinds) < _MAX_MODELS:
            self.kinds[kind] += 1
        if form.has_unknown_parameters is not False:
            form.has_unknown_parameters = self.unknown.add(url, body, number)


LookUp = Callable[[RawLine, Line | None, Mapping[str, Any] | None], bool]
"""Called with each line, its request, or None if malformed, and its body including defaults.

Returns whether the line already has a row.
"""


def check_lines(
    requests: InputFile,
    served_names: Sequence[str],
    *,
    adapters: Sequence[str] = (),
    endpoints: Sequence[str] = ENDPOINTS,
    defaults: Defaults = _NO_DEFAULTS,
    tmp_dir: Path | None,
    index: LineIndex,
    look_up: LookUp | None = None,
) -> InputReport:
    """Read the whole input once, fill its index and return the findings; memory stays flat.

    Requests may also select `adapters`; the model serves `endpoints`.
    """
    served_names = (*served_names, *adapters)
    report = InputReport(requests, served_names, tuple(adapters))
    forms = BodyForms(served_names, endpoints)
    next_word = time.monotonic() + _SECONDS_PER_WORD
    with DuplicateFinder(tmp_dir) as finder:
        check = _LineCheck(report, index, finder, forms, defaults, look_up, bool(defaults.flags))
        for number, (raw, start) in enumerate(requests.placed_lines(), start=1):
            check.add(raw, start)
            if number % _LINES_PER_CLOCK == 0 and time.monotonic() >= next_word:
                log(f"checking {report.name}: {amount(number, report.unit)}")
                next_word = time.monotonic() + _SECONDS_PER_WORD
        report.duplicates = finder.find(_MAX_NAMED_DUPLICATES)
    if requests.part is not None and report.is_hopeless:
        report.others_run = _can_any_run(
            replace(requests, part=None), served_names, endpoints, defaults
        )
    return report


@dataclass(slots=True)
class _LineCheck:
    """Check of the lines of one input, each parsed at most once."""

    report: InputReport
    index: LineIndex
    finder: DuplicateFinder
    forms: BodyForms
    defaults: Defaults
    look_up: LookUp | None
    has_defaults: bool
    pattern: LinePattern | None = None
    parsed: tuple[bytes, BodyForm] | None = None  # the latest parsed request
    num_parsed: int = 0
    num_until_search: int = 2

    def add(self, raw: RawLine, start: int) -> None:
        """Check the next line, which starts at this byte."""
        report, number = self.report, raw.number
        report.num_rows += 1
        if (pattern := self.pattern) is not None and (match := pattern.match(raw.data)) is not None:
            custom_id, key = match
            self.finder.add_encoded(custom_id, number)
            report.kinds[pattern.kind] += 1
            described = key, pattern.max_tokens, pattern.form.hash_of(key)
            self.index.add_described(start, len(raw.data), number, described)
            return
        try:
            fields = parse_fields(raw)
        except LineError as exc:
            self.index.add(start, raw.num_bytes, number)
            if self.look_up is not None:
                self.look_up(raw, None, None)
            report.add_malformed(exc)
            return
        self.finder.add(fields["custom_id"], number)
        url, body = fields["url"], fields["body"]
        if self.has_defaults:
            body = self.defaults.apply(url, body)
            report.without_effect.update(self.defaults.without_effect(url))
        form = self.forms.form_of(url, body)
        report.add_request(number, url, body, form)
        if self.look_up is not None and self.look_up(raw, line_of(raw, fields), body):
            self.index.add(start, raw.num_bytes, number)
            return
        self.index.add(start, len(raw.data), number, body, form)
        try:
            self.forms.check(url, body, form)
        except RequestError as exc:
            if PLACES_MARK in raw.data:
                from tidemill.batch.file.vendor_lines import own_error  # late: few are a vendor's

                exc.message = own_error({"message": exc.message}, raw.data)["message"]
            report.add_failing(exc, body, number)
            return
        if self.look_up is None:
            self._note_parsed(raw.data, url, form)

    def _note_parsed(self, data: bytes, url: str, form: BodyForm) -> None:
        """Look for the pattern of this line and the one before, ever more rarely."""
        latest, self.parsed = self.parsed, (data, form)
        self.num_parsed += 1
        if latest is None or latest[1] is not form or self.num_parsed < self.num_until_search:
            return
        self.num_until_search = 2 * self.num_parsed
        is_counted = (url, form.model) in self.report.kinds and not form.has_unknown_parameters
        if is_counted and not self.defaults.without_effect(url):
            found = find_pattern(data, latest[0], form, self.defaults.apply)
            self.pattern = self.pattern if found is None else found


def _can_any_run(
    requests: InputFile, served_names: Sequence[str], endpoints: Sequence[str], defaults: Defaults
) -> bool:
    for raw in requests.lines():
        with suppress(LineError, RequestError):
            line = parse_line(raw)
            body = defaults.apply(line.url, line.body)
            check_request(line.url, body, served_names, endpoints)
            return True
    return False


def refuse_bad_lines(report: InputReport) -> None:
    """Raise BadInput with the malformed lines, up to `MAX_NAMED` in detail.

    For a file without any request, the message contains its probable format.
    """
    if not report.num_bad:
        return
    suspicion = report.requests.form.suspicion
    if report.num_bad == report.num_rows and suspicion is not None:
        example = "" if "--prompt" in suspicion else f"\n{_example()}"
        raise BadInput(f"{report.name} cannot be run. {suspicion}{example}")
    named = sentences_by_line(report.bad, report.unit)
    if num_more := report.num_bad - len(report.bad):
        named.append(f"  and {amount(num_more, f'more {report.unit}')}")
    if report.lacks_parts:
        named.append(_example())
    bad = _bad(report)
    raise BadInput(
        "\n".join(
            (
                f"{report.name} has {bad}; nothing was run:",
                *named,
                "Correct them, or run the rest and give these an error row: --on-invalid-line skip",
            )
        )
    )


def refuse_hopeless(report: InputReport) -> None:
    """Raise BadInput with the reasons if none of the lines can run.

    A shard still runs if lines of other shards can run, because the whole file would run, too.
    """
    num_failing = report.failing.count
    if not report.is_hopeless or report.others_run:
        return
    if num_failing and report.models.total() == num_failing:
        raise BadInput(
            f"{_requested_models(report)}; to run them, pass {_ways(report)}. Nothing was run"
        )
    lines = amount(report.num_rows, report.unit)
    raise BadInput(
        "\n".join(
            (
                f"none of the {lines} of {report.name} can run; nothing was run:",
                *_reasons(report),
            )
        )
    )


def refuse_other_requests(report: InputReport) -> None:
    """Raise BadInput if a cascade has requests other than decisions."""
    other = next((url for url, _ in report.kinds if url not in DECISION_URLS), None)
    if other is not None:
        raise BadInput(
            f"{report.name} has requests for {other}, but --escalate needs questions to decide: "
            f"use only {' and '.join(DECISION_URLS)}. Nothing was run"
        )


def warn_of_failing(report: InputReport) -> None:
    """Warn about lines that will get an error row."""
    num_failing = report.failing.count + report.num_bad
    if num_failing:
        lines = f"{num_failing:,} of {amount(report.num_rows, report.unit)}"
        log("\n".join((f"warning: {lines} will get an error row:", *_reasons(report))))


def warn_of_unknown_parameters(report: InputReport, *, is_strict: bool = False) -> None:
    """Warn about unknown parameters, which have no effect; raise BadInput if `is_strict`."""
    unknown = sentences(report.unknown, report.unit)
    if unknown and is_strict:
        words = f"{report.name} has unknown parameters; nothing was run:"
        raise BadInput("\n".join((words, *unknown, "Correct them, or remove --strict-parameters")))
    if unknown:
        log("\n".join(("warning: unknown parameters have no effect:", *unknown)))


def warn_of_defaults(report: InputReport) -> None:
    """Warn about defaults without effect on some lines; raise BadInput if it is all lines."""
    num_lines = report.num_rows - report.num_bad
    for flag, count in sorted(report.without_effect.items()):
        if count == num_lines and report.requests.part is None:
            raise BadInput(
                f"{flag} has no effect on any {report.unit} of {report.name}, whose URLs have no "
                "such parameter: remove it. Nothing was run"
            )
        lines = f"{count:,} of {amount(report.num_rows, report.unit)}"
        log(f"warning: {flag} has no effect on {lines}, whose URL has no such parameter")


def warn_of_duplicates(duplicates: Duplicates, unit: str) -> None:
    """Warn about duplicate custom_ids; only the order distinguishes their rows."""
    if not duplicates.count:
        return
    named = ", ".join(f"{line} (as {unit} {first})" for line, first in duplicates.first)
    more = ", …" if duplicates.count > len(duplicates.first) else ""
    repeat = "repeats" if duplicates.count == 1 else "repeat"
    log(f"warning: {amount(duplicates.count, unit)} {repeat} a custom_id: {named}{more}")


def refuse_repeated_ids(report: InputReport) -> None:
    """Raise BadInput for a table whose ID column has repeated values."""
    duplicates = report.duplicates
    if duplicates.count:
        named = ", ".join(f"{row} (as row {first})" for row, first in duplicates.first)
        more = ", …" if duplicates.count > len(duplicates.first) else ""
        raise BadInput(
            f"{amount(duplicates.count, 'row')} of {report.name} repeat an ID: {named}{more}. "
            "Pass another column with --id, or remove it to use row numbers. Nothing was run"
        )


def _bad(report: InputReport) -> str:
    if report.requests.form.is_table:
        return f"{amount(report.num_bad, 'row')} without a request"
    return amount(report.num_bad, f"malformed {report.unit}")


def _reasons(report: InputReport) -> list[str]:
    own = [name for name in own_names(report.served_names) if name not in report.adapters]
    ways = _ways(report, own)
    hint = [f"to run requests for other models, pass {ways}"] if report.models else []
    reasons = (report.failing, report.malformed)
    return [*(each for some in reasons for each in some.sentences(report.unit)), *hint]


def _requested_models(report: InputReport) -> str:
    """Return `20 of 20 lines request gpt-4o, but the served model is tidemill-demo`."""
    count = report.models.total()
    names = [
        f"{without_control_chars(name)} ({number:,})"
        if len(report.models) > 1
        else without_control_chars(name)
        for name, number in report.models.most_common(_MAX_NAMED_MODELS)
    ]
    more = len(report.models) - len(names)
    served = own_names(report.served_names)
    return (
        f"{count:,} of {amount(report.num_rows, report.unit)} request {', '.join(names)}"
        f"{f' and {more:,} more' if more else ''}, but the served "
        f"{'models are' if len(served) > 1 else 'model is'} {', '.join(served)}"
    )


def _ways(report: InputReport, others: Sequence[str] = ()) -> str:
    """Return the flags that serve the model under the requested names and `others`."""
    if len(report.models) > _MAX_NAMED_MODELS:
        return "`--any-model`"
    import shlex

    names = [*others, *(name for name, _ in report.models.most_common())]
    return f"`{shlex.join(['--served-model-name', *names])}` or `--any-model`"


def _example() -> str:
    return f"Example of a valid line:\n{EXAMPLE_LINE}"
