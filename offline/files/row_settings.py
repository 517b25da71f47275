"""Row settings: the settings of an output's rows, and differences between two sets of settings.

While a run is incomplete, they are stored next to its spool, in `rows.jsonl.settings`. A complete
run moves them to its run card, a shard's run to the shard's mark.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

from ..console.errors import BadInput
from ..console.terminal import amount
from .durable_json import save_json
from .paths import SPOOL_SUFFIX

SUFFIX: Final = ".settings"
RAISABLE: Final = frozenset({"--max-tokens", "--max-model-len"})
"""Limits of answers: a higher limit does not change rows that did not reach the lower one."""

_OBJECT: Final = "row.settings"
_FILE_IDS: Final = ("revision", "digest")
_MAX_CHARS: Final = 60
_MAX_ID_CHARS: Final = 12
_CONTEXT_CHARS: Final = 20

Settings = Mapping[str, Any]
"""Values by flag, without defaults.

The value of a model or an adapter contains the given `name` and the identity of its files.
"""
Differences = Mapping[str, tuple[Any, Any]]
"""Earlier and current value by flag; None means the default."""


@dataclass(frozen=True, slots=True)
class SettingsUse:
    """Settings of some rows, and the number of those rows; None means unknown."""

    settings: Settings | None
    num_rows: int | None = None


@dataclass(frozen=True, slots=True)
class RowSettings:
    """Settings of all rows of an output, oldest first.

    `retries_truncated` belongs to an interrupted retry, which also reruns truncated rows.
    """

    uses: tuple[SettingsUse, ...]
    retries_truncated: bool = False

    @classmethod
    def parse(cls, found: Any, *, retries_truncated: bool = False) -> Self | None:
        """Return the settings of a parsed list; None for none, ValueError for anything else."""
        if not found:
            return None
        try:
            uses = tuple(SettingsUse(each["settings"], each["rows"]) for each in found)
        except (KeyError, TypeError) as exc:
            raise ValueError("not a list of settings") from exc
        return cls(uses, retries_truncated)

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """Read a file; None where it does not exist. Raises BadInput for another kind of file."""
        try:
            found = json.loads(path.read_bytes())
            return cls.parse(found["made_with"], retries_truncated=found["retries_truncated"])
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise BadInput(f"{path} cannot be read ({exc.strerror})") from exc
        except (ValueError, KeyError, TypeError) as exc:
            raise BadInput(
                f"{path} does not contain the settings of rows: remove it; --resume then keeps the "
                "rows without comparing their settings"
            ) from exc

    def save(self, path: Path) -> None:
        """Write the file atomically; raises OSError."""
        found = {
            "object": _OBJECT,
            "made_with": self.as_list(),
            "retries_truncated": self.retries_truncated,
        }
        save_json(path, found)

    def as_list(self) -> list[dict[str, Any]]:
        """Return the list that `parse` reads."""
        return [{"rows": use.num_rows, "settings": use.settings} for use in self.uses]

    @property
    def latest(self) -> Settings | None:
        """Return the settings of the newest rows."""
        return self.uses[-1].settings

    @property
    def has_rows(self) -> bool:
        """Return whether there are rows, or their number is unknown."""
        return any(use.num_rows != 0 for use in self.uses)

    def continued(self, now: Settings, num_kept: int, *, is_retry: bool) -> Self:
        """Return these settings before new rows are added to `num_kept` rows.

        It is unknown which settings the rows had that a retry replaces, so with several settings
        their numbers of rows become unknown.
        """
        uses = self.uses
        if len(uses) == 1:
            uses = (replace(uses[0], num_rows=num_kept),)
        elif is_retry:
            uses = tuple(replace(use, num_rows=None) for use in uses)
        else:
            uses = _with_last(uses, num_kept)
        if self.latest is not None and not differences(self.latest, now):
            uses = uses[:-1]
        return replace(self, uses=(*uses, SettingsUse(now)))

    def counted(self, num_rows: int) -> Self:
        """Return the settings of a complete output with this number of rows."""
        return replace(self, uses=_with_last(self.uses, num_rows))


def _with_last(uses: tuple[SettingsUse, ...], num_rows: int) -> tuple[SettingsUse, ...]:
    """Return the uses, with the remaining number of rows for the last one."""
    others = [use.num_rows for use in uses[:-1]]
    known = [count for count in others if count is not None]
    rest = max(0, num_rows - sum(known)) if len(known) == len(others) else None
    return (*uses[:-1], replace(uses[-1], num_rows=rest))


def joined_settings(parts: Iterable[tuple[RowSettings | None, int]]) -> RowSettings | None:
    """Return the settings of joined outputs with their numbers of rows; None if all are unknown."""
    counts: dict[str, SettingsUse] = {}
    for part, num_rows in parts:
        uses = (SettingsUse(None, num_rows),) if part is None else part.uses
        for use in uses:
            same = counts.setdefault(_text(use.settings), SettingsUse(use.settings, 0))
            is_known = same.num_rows is not None and use.num_rows is not None
            total = (same.num_rows or 0) + (use.num_rows or 0) if is_known else None
            counts[_text(use.settings)] = replace(same, num_rows=total)
    uses = tuple(use for use in counts.values() if use.num_rows != 0)
    return RowSettings(uses) if any(use.settings is not None for use in uses) else None


def settings_path(output: Path) -> Path:
    """Return the path of the settings of an output's rows."""
    target = Path(os.path.realpath(output))
    return target.with_name(target.name + SUFFIX)


def settings_path_of(spool: Path) -> Path:
    """Return the path of the settings next to a spool."""
    return spool.with_name(spool.name.removesuffix(SPOOL_SUFFIX) + SUFFIX)


def differences(before: Settings, now: Settings) -> Differences:
    """Return the settings that differ."""
    names = dict.fromkeys((*before, *now))
    pairs = {name: (before.get(name), now.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if not _are_same(*pair)}


def without_raised_limits(found: Differences) -> Differences:
    """Return the differences, except raised limits of answers."""
    return {name: pair for name, pair in found.items() if not _is_raised(name, *pair)}


def _is_raised(name: str, before: Any, now: Any) -> bool:
    if now is None:
        return name == "--max-tokens"
    are_numbers = isinstance(before, int) and isinstance(now, int)
    return name in RAISABLE and are_numbers and now > before


def describe(found: Differences, before: str = "before", now: str = "now") -> list[str]:
    """Return a line for each difference, with shortened values."""
    return [
        f"  {name}: {old} {before}, {new} {now}"
        for name, pair in found.items()
        for old, new in [_shown(*pair)]
    ]


def refusal(target: Path, found: Differences, *more_ways: str) -> str:
    """Return the message for a command that differs from the rows of an output."""
    head = f"the rows of {target} have other settings than this command:"
    way = "Pass the same settings, or start over with --force without --resume."
    return "\n".join((head, *describe(found), " ".join((way, *more_ways))))


def use_lines(uses: Sequence[SettingsUse]) -> list[str]:
    """Return a line for each use, with its rows and the settings in which the uses differ."""
    known = [use.settings for use in uses if use.settings is not None]
    names = dict.fromkeys(name for each in known[1:] for name in differences(known[0], each))
    lines = []
    for use in uses:
        rows = "an unknown number of rows" if use.num_rows is None else amount(use.num_rows, "row")
        if use.settings is None:
            lines.append(f"{rows}: unknown settings")
            continue
        values = (f"{name} {_short(_plain(use.settings.get(name)))}" for name in names)
        lines.append(f"{rows}: {', '.join(values) or 'the settings of this command'}")
    return lines


def _are_same(one: Any, other: Any) -> bool:
    if _is_of_files(one) and _is_of_files(other):
        ids = [(one.get(name), other.get(name)) for name in _FILE_IDS]
        known = [pair for pair in ids if all(pair)]
        if known:
            return any(first == second for first, second in known)
        return bool(one["name"] == other["name"])
    return _text(one) == _text(other)


def _is_of_files(value: Any) -> bool:
    return isinstance(value, Mapping) and "digest" in value


def _text(value: Any) -> str:
    """Return the value as JSON; the order of object members matters, as in a schema."""
    return json.dumps(value, default=str)


def _shown(before: Any, now: Any) -> tuple[str, str]:
    """Return two values, shortened to the part that differs."""
    old, new = _plain(before), _plain(now)
    pairs = enumerate(zip(old, new, strict=False))
    start = next((place for place, (one, other) in pairs if one != other), min(len(old), len(new)))
    if start > _MAX_CHARS // 2:
        old, new = (f"…{text[start - _CONTEXT_CHARS :]}" for text in (old, new))
    return _short(old), _short(new)


def _short(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}…"


def _plain(value: Any) -> str:
    if value is None:
        return "not set"
    if value is True:
        return "set"
    if _is_of_files(value):
        found = next((str(value[name]) for name in _FILE_IDS if value.get(name)), "unknown")
        return f"{value['name']} (files {found[:_MAX_ID_CHARS]})"
    if isinstance(value, str) and re.fullmatch(r"[\w./:@+-]+", value):
        return value
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text.encode("utf-8", "replace").decode()
