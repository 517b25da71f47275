"""The pass over the whole input before a model is loaded: what will not run is told in time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cli.errors import BadInput
from cli.files.defaults import Defaults
from cli.files.requests import Requests
from cli.kinds import Kinds, told_by_line
from cli.terminal import amount, plain, say
from engine.batchfile.duplicates import DuplicateFinder, Duplicates
from engine.batchfile.lines import EXAMPLE_LINE, LineError, parse_line
from engine.protocol.errors import ModelNotFound, RequestError
from engine.protocol.names import own_names
from engine.protocol.requests import check_request
from engine.protocol.routes import ENDPOINTS

MAX_NAMED = 100

_NO_DEFAULTS = Defaults()
_MAX_NAMED_DUPLICATES = 5
_MAX_NAMED_MODELS = 5
_MAX_MODELS = 1_000
_MAX_NAME_CHARS = 100
_LINES_PER_LOOK = 10_000
_SECONDS_PER_WORD = 5.0


@dataclass(slots=True)
class Checked:
    """What the pass found: `num_rows` lines get a row, and of some it is known that it is an error.

    `num_bad` are no requests, the first of them in `bad`, by number and message. `failing` are
    requests that the engine will refuse; `models` counts, of the names that those ask for, the ones
    that are not served. `without_effect` counts, for each flag of a default, the lines that have no
    such parameter.
    """

    requests: Requests
    served_names: tuple[str, ...]
    adapters: tuple[str, ...] = ()
    num_rows: int = 0
    num_bad: int = 0
    bad: list[tuple[int, str]] = field(default_factory=list)
    lacks_parts: bool = False
    failing: Kinds = field(default_factory=Kinds)
    models: Counter[str] = field(default_factory=Counter)
    duplicates: Duplicates = field(default_factory=lambda: Duplicates(0, ()))
    without_effect: Counter[str] = field(default_factory=Counter)

    @property
    def name(self) -> str:
        """The input, as it is shown."""
        return self.requests.source.name

    @property
    def unit(self) -> str:
        """What its numbers count."""
        return self.requests.form.unit


def check_lines(
    requests: Requests,
    served_names: Sequence[str],
    *,
    adapters: Sequence[str] = (),
    endpoints: Sequence[str] = ENDPOINTS,
    defaults: Defaults = _NO_DEFAULTS,
    tmp_dir: Path | None,
) -> Checked:
    """Read the whole input once and return what is in it; memory stays flat.

    Lines may ask for `adapters`, too; the model answers `endpoints`.
    """
    served_names = (*served_names, *adapters)
    has_defaults = bool(defaults.flags)
    checked = Checked(requests, served_names, tuple(adapters))
    next_word = time.monotonic() + _SECONDS_PER_WORD
    with DuplicateFinder(tmp_dir) as finder:
        for raw in requests.lines():
            checked.num_rows += 1
            try:
                line = parse_line(raw)
            except LineError as exc:
                checked.num_bad += 1
                checked.lacks_parts |= exc.code == "missing_required_parameter"
                if len(checked.bad) < MAX_NAMED:
                    # Not the exception, which holds its line.
                    checked.bad.append((exc.line, exc.message))
                continue
            finder.add(line.custom_id, line.number)
            body = line.body
            if has_defaults:
                checked.without_effect.update(defaults.without_effect(line.url))
                body = defaults.apply(line.url, body)
            try:
                check_request(line.url, body, served_names, endpoints)
            except RequestError as exc:
                checked.failing.add(exc.message, line.number)
                if isinstance(exc, ModelNotFound) and len(checked.models) < _MAX_MODELS:
                    checked.models[line.body["model"][:_MAX_NAME_CHARS]] += 1
            if checked.num_rows % _LINES_PER_LOOK == 0 and time.monotonic() >= next_word:
                say(f"checking {checked.name}: {amount(checked.num_rows, checked.unit)}")
                next_word = time.monotonic() + _SECONDS_PER_WORD
        checked.duplicates = finder.find(_MAX_NAMED_DUPLICATES)
    return checked


def refuse_bad_lines(checked: Checked) -> None:
    """Raise BadInput that names every line which is no request, the first `MAX_NAMED` one by one.

    A file without a single request is told what it looks like.
    """
    if not checked.num_bad:
        return
    suspicion = checked.requests.form.suspicion
    if checked.num_bad == checked.num_rows and suspicion is not None:
        raise BadInput(f"{checked.name} cannot be run. {suspicion}\n{_example()}")
    named = told_by_line(checked.bad, checked.unit)
    if num_more := checked.num_bad - len(checked.bad):
        named.append(f"  and {amount(num_more, f'more {checked.unit}')}")
    if checked.lacks_parts:
        named.append(_example())
    bad = amount(checked.num_bad, f"malformed {checked.unit}")
    raise BadInput(
        "\n".join(
            (
                f"{checked.name} has {bad}; nothing was run:",
                *named,
                "Mend them, or give them an error row and run the rest: --on-invalid-line skip",
            )
        )
    )


def refuse_hopeless(checked: Checked) -> None:
    """Raise BadInput with the reasons when there are lines and none of them can run."""
    num_failing = checked.failing.count
    if not checked.num_rows or num_failing + checked.num_bad < checked.num_rows:
        return
    if num_failing and checked.models.total() == num_failing:
        raise BadInput(f"{_asked_for(checked)}; {_ways(checked)} runs them. Nothing was run")
    lines = amount(checked.num_rows, checked.unit)
    raise BadInput(
        "\n".join(
            (
                f"none of the {lines} of {checked.name} can run; nothing was run:",
                *_reasons(checked),
            )
        )
    )


def warn_of_failing(checked: Checked) -> None:
    """Say which lines will get an error row, while they can still be mended."""
    num_failing = checked.failing.count + checked.num_bad
    if num_failing:
        lines = f"{num_failing:,} of {amount(checked.num_rows, checked.unit)}"
        say("\n".join((f"warning: {lines} will get an error row:", *_reasons(checked))))


def warn_of_defaults(checked: Checked) -> None:
    """Say which defaults some lines have no parameter for; BadInput where no line has one."""
    num_lines = checked.num_rows - checked.num_bad
    for flag, count in sorted(checked.without_effect.items()):
        if count == num_lines:
            raise BadInput(
                f"no {checked.unit} of {checked.name} has a url that {flag} is for: leave it out. "
                "Nothing was run"
            )
        lines = f"{count:,} of {amount(checked.num_rows, checked.unit)}"
        say(f"warning: {flag} has no effect on {lines}, whose url has no such parameter")


def warn_of_duplicates(duplicates: Duplicates) -> None:
    """Say which lines repeat a custom_id; their rows can be told apart by their order only."""
    if not duplicates.count:
        return
    named = ", ".join(f"{line} (as line {first})" for line, first in duplicates.first)
    more = ", …" if duplicates.count > len(duplicates.first) else ""
    repeat = "line repeats" if duplicates.count == 1 else "lines repeat"
    say(f"warning: {duplicates.count:,} {repeat} a custom_id: {named}{more}")


def _reasons(checked: Checked) -> list[str]:
    malformed = f"malformed {checked.unit}"
    bad = [f"  {amount(checked.num_bad, malformed)}"] if checked.num_bad else []
    own = [name for name in own_names(checked.served_names) if name not in checked.adapters]
    ways = _ways(checked, own)
    hint = [f"{ways} runs those that ask for other models"] if checked.models else []
    return [*checked.failing.told(checked.unit), *bad, *hint]


def _asked_for(checked: Checked) -> str:
    """Return `20 of 20 lines ask for gpt-4o-mini, served is tidemill-demo`."""
    count = checked.models.total()
    names = [
        f"{plain(name)} ({number:,})" if len(checked.models) > 1 else plain(name)
        for name, number in checked.models.most_common(_MAX_NAMED_MODELS)
    ]
    more = len(checked.models) - len(names)
    served = own_names(checked.served_names)
    return (
        f"{count:,} of {amount(checked.num_rows, checked.unit)} ask for {', '.join(names)}"
        f"{f' and {more:,} more' if more else ''}, served {'are' if len(served) > 1 else 'is'} "
        f"{', '.join(served)}"
    )


def _ways(checked: Checked, others: Sequence[str] = ()) -> str:
    """Return the flags that make these names mean the model, and others that do already."""
    if len(checked.models) > _MAX_NAMED_MODELS:
        return "`--any-model`"
    import shlex

    names = [*others, *(name for name, _ in checked.models.most_common())]
    return f"`{shlex.join(['--served-model-name', *names])}` or `--any-model`"


def _example() -> str:
    return f"A line looks like this:\n{EXAMPLE_LINE}"
