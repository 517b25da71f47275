"""Unknown parameters of a file's lines: counted by endpoint and name, and described."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from tidemill.protocol.parameters import find_parameters

MAX_NAMES: Final = 100
"""Maximum number of counted names; further ones are counted together."""

MAX_LISTED: Final = 20

_MAX_NAME_CHARS = 64


@dataclass(frozen=True, slots=True)
class UnknownParameter:
    """A parameter that an endpoint does not support, in `count` lines.

    The first of them is `first_line`; `suggestion` is the parameter that was probably meant.
    """

    name: str
    url: str
    count: int
    first_line: int
    suggestion: str | None = None

    def sentence(self, unit: str = "line", *, names_first: bool = True) -> str:
        """Return a sentence about it, without the full stop."""
        lines = f"{self.count:,} {unit}{'' if self.count == 1 else 's'}"
        first = f" ({'' if self.count == 1 else 'first: '}{unit} {self.first_line:,})"
        which = f"`{self.name}` in {lines}{first if names_first else ''}"
        words = f"{which} is not a parameter of {self.url}"
        return f"{words}; did you mean `{self.suggestion}`?" if self.suggestion else words


@dataclass(slots=True)
class UnknownParameters:
    """Counts of unknown parameters; memory is bounded by `MAX_NAMES`.

    `found` has them by endpoint and name. `num_others` counts appearances of further names.
    """

    found: dict[str, UnknownParameter] = field(default_factory=dict)
    num_others: int = 0

    def add(self, url: str, body: Mapping[str, Any], line: int) -> bool:
        """Count the unknown parameters of a line's body; return whether there are any."""
        known = find_parameters(url)
        if known is None:
            return False
        names = known.unknown_in(body)
        for name in names:
            self._count(known.endpoint, _printable(name), line)
        return bool(names)

    def merge(self, others: UnknownParameters, shift: int = 0) -> None:
        """Add the counts of later lines, whose numbers start after `shift`."""
        for other in others.found.values():
            self._count(other.url, other.name, other.first_line + shift, other.count)
        self.num_others += others.num_others

    def most_frequent(self, limit: int = MAX_LISTED) -> tuple[UnknownParameter, ...]:
        """Return the most frequent ones with suggestions; equal counts keep their order."""
        ranked = sorted(self.found.values(), key=lambda each: -each.count)[:limit]
        return tuple(replace(each, suggestion=_suggestion(each)) for each in ranked)

    def _count(self, url: str, name: str, line: int, count: int = 1) -> None:
        key = f"{url} {name}"
        seen = self.found.get(key)
        if seen is not None:
            self.found[key] = replace(seen, count=seen.count + count)
        elif len(self.found) < MAX_NAMES:
            self.found[key] = UnknownParameter(name, url, count, line)
        else:
            self.num_others += count


def sentences(unknown: UnknownParameters, unit: str = "line") -> list[str]:
    """Return an indented sentence for each of the most frequent ones, and one for the others."""
    listed = unknown.most_frequent()
    others = sum(each.count for each in unknown.found.values()) + unknown.num_others
    others -= sum(each.count for each in listed)
    named = [f"  {each.sentence(unit)}" for each in listed]
    return [*named, *([f"  {others:,} × other names"] if others else [])]


def _suggestion(unknown: UnknownParameter) -> str | None:
    known = find_parameters(unknown.url)
    return None if known is None else known.nearest(unknown.name)


def _printable(name: str) -> str:
    """Return a name of bounded length with unprintable characters escaped."""
    shown = name[:_MAX_NAME_CHARS]
    if not shown.isprintable():
        shown = "".join(
            char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
            for char in shown
        )
    is_whole = len(name) <= _MAX_NAME_CHARS and len(shown) <= _MAX_NAME_CHARS
    return shown if is_whole else f"{shown[:_MAX_NAME_CHARS]}…"
