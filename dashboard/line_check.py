"""Check of requests: the lines of a file, or those of the rendered rows of a table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from pydantic_core import to_json

from tidemill.batch.file.duplicate_ids import DuplicateFinder
from tidemill.batch.file.expected_tokens import NO_TOKENS
from tidemill.batch.file.lines import Line, RawLine
from tidemill.batch.validation import Findings, LineChecker, judge
from tidemill.protocol.validation import printable

from .checked_file import CheckOptions, FileCheck

MAX_SHOWN: Final = 3
_MAX_CHARS: Final = 1_200
_MAX_ERRORS: Final = 5
_MORE_NAMES: Final = "Use one of these."
_TEMPLATE: Final = re.compile(r"the template of `(?:messages\[\d+\]\.content|prompt|input)`")


def check_lines(
    check: FileCheck,
    lines: Iterable[RawLine],
    options: CheckOptions,
    *,
    mistake: str | None = None,
    is_whole: bool,
) -> FileCheck:
    """Return the check of the lines of requests, or of a table's rendered rows."""
    findings = Findings()
    shown: list[Line] = []
    models: dict[str, None] = {}
    endpoints: dict[str, None] = {}
    with DuplicateFinder() as finder:
        checker = LineChecker(
            findings,
            models=options.models,
            endpoint=None,
            add_id=finder.add,
            more_names=_MORE_NAMES,
            media=options.media,
        )
        for raw in lines:
            line = checker.check(raw)
            if line is None:
                continue
            if len(shown) < MAX_SHOWN:
                shown.append(line)
            models[str(line.body.get("model") or findings.model or "")] = None
            endpoints[line.url] = None
        duplicates = finder.find()
    verdict = judge(
        findings,
        duplicates,
        mistake=mistake,
        on_invalid_line=options.on_invalid_line,
        strict_parameters=options.strict_parameters,
        unit=check.unit,
    )
    is_skipping = options.on_invalid_line == "skip"
    errors = verdict.errors
    if is_skipping and findings.model is None and findings.num_rows and not is_whole:
        errors = ()  # later lines may be valid
    notes = (
        []
        if options.strict_parameters
        else [f"Ignored: {each.sentence(check.unit)}" for each in findings.unknown.most_frequent(3)]
    )
    if is_skipping and findings.num_errors and not errors:
        notes.insert(
            0,
            f"{findings.num_errors:,} of the first {findings.num_rows:,} {check.unit}s are invalid "
            f"and get an error row. The first is {_sentence(findings.errors[0], check.unit)}",
        )
    return replace(
        check,
        errors=[_sentence(error, check.unit) for error in errors[:_MAX_ERRORS]],
        num_errors=verdict.num_errors if errors else 0,
        notes=[*check.notes, *map(printable, notes)],
        num_read=findings.num_rows,
        models=[printable(name, 100) for name in [*models][:_MAX_ERRORS] if name],
        endpoints=[*endpoints][:_MAX_ERRORS],
        model=findings.model,
        endpoint=findings.endpoint or "",
        requests=[_shown(line.body) for line in shown],
        expected=findings.expected if findings.num_rows else NO_TOKENS,
    )


def _sentence(error: Any, unit: str) -> str:
    place = "" if error.line is None else f"{unit.capitalize()} {error.line:,}: "
    return in_words_of_form(f"{place}{error.message}")


def _shown(body: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the messages of a request, or its other fields, as pairs of a name and a text."""
    messages = body.get("messages")
    pairs: list[tuple[Any, Any]] = []
    if isinstance(messages, list) and all(isinstance(each, dict) for each in messages):
        pairs = [(each.get("role"), each.get("content")) for each in messages]
    else:
        pairs = [*body.items()]
    found = [(printable(str(name), 60), _text(value)) for name, value in pairs[:8]]
    return found or [("messages", "[]")]


def _text(value: Any) -> str:
    if isinstance(value, str):
        return printable(value, _MAX_CHARS)
    try:
        return printable(to_json(value).decode(), _MAX_CHARS)
    except ValueError:  # a lone surrogate
        return printable(repr(value), _MAX_CHARS)


def in_words_of_form(text: str) -> str:
    """Return a message about a recipe as one about the form."""
    return printable(_TEMPLATE.sub("the prompt", text), 600)
