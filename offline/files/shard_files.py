"""Files of the shards of one output: found by name, and checked for completeness."""

from __future__ import annotations

import fcntl
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Final

from ..console.errors import Refused
from ..console.terminal import amount, log
from .paths import spool_path
from .retry import retry_files
from .row_settings import RowSettings, describe, differences, settings_path
from .shard import Shard
from .shard_mark import ShardMark, mark_path

_MAX_NAMED: Final = 20


@dataclass(frozen=True, slots=True)
class ShardFiles:
    """Files of one shard's rows, and the mark that its run wrote."""

    shard: Shard
    output: Path
    errors: Path | None

    @property
    def paths(self) -> list[Path]:
        """Return the paths of its rows; the error file exists only if there are error rows."""
        return [self.output] if self.errors is None else [self.output, self.errors]

    @property
    def mark_path(self) -> Path:
        """Return the path of its mark."""
        return mark_path(self.output)

    def check_ended(self) -> None:
        """Raise Refused if the run is still running or was stopped."""
        with locked(self.output):
            left = [spool_path(self.output), *retry_files(self.output, self.errors)]
            if any(path.exists() for path in left):
                raise Refused(f"{self.output} is not finished: run its shard with --resume")

    def load_mark(self) -> ShardMark:
        """Return the mark; raises Refused if it is missing or does not match the rows."""
        try:
            mark = ShardMark.load(self.mark_path)
        except FileNotFoundError:
            raise Refused(
                f"{self.output} has no {self.mark_path.name}, so its run has not finished: run "
                "its shard with --resume, or pass -i to compare the rows with the input's lines"
            ) from None
        except ValueError as exc:
            raise Refused(f"{exc}: run its shard with --resume to write it again") from exc
        if mark.lines.shard != self.shard:
            raise Refused(
                f"{self.mark_path} belongs to {mark.lines.shard}: run this shard with --resume"
            )
        if (mark.error_bytes is None) != (self.errors is None):
            had = "no error file: remove -e" if self.errors else "an error file: pass it with -e"
            raise Refused(f"the run of {self.output} had {had}")
        for path, num_bytes in zip(self.paths, (mark.output_bytes, mark.error_bytes), strict=False):
            found = path.stat().st_size if path.exists() else 0
            if found != num_bytes:
                raise Refused(
                    f"{path} has {found:,} bytes, but had {num_bytes:,} when its run ended: run "
                    "its shard with --resume"
                )
        return mark

    def settings(self) -> RowSettings | None:
        """Return the settings of its rows; None if they are unknown."""
        if (found := RowSettings.load(settings_path(self.output))) is not None:
            return found
        try:
            return RowSettings.parse(ShardMark.load(self.mark_path).made_with)
        except (OSError, ValueError):
            return None

    def remove(self) -> None:
        """Remove the files, the mark and the settings."""
        for path in (self.mark_path, settings_path(self.output), *self.paths):
            path.unlink(missing_ok=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a run's output; raises Refused while a run writes it."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"a run is writing {path}") from None
        except OSError:
            pass  # the file system does not support locks
        yield


def find_shards(output: Path, errors: Path | None, count: int | None) -> list[ShardFiles]:
    """Return the files of all shards of an output, in order; raises Refused if one is missing.

    The default for `count` is taken from the files' names, which must agree.
    """
    found = _numbers_by_count(output)
    if count is None:
        if not found:
            raise Refused(f"no shards of {output} found, such as {Shard(1, 2).path(str(output))}")
        if len(found) > 1:
            counts = ", ".join(f"{each:,}" for each in sorted(found))
            raise Refused(
                f"{output} has shards of several runs, with different numbers of shards "
                f"({counts}): choose one with -n"
            )
        [count] = found
    numbers = found.get(count, set())
    missing = (number for number in range(1, count + 1) if number not in numbers)
    _refuse_all(
        [
            f"{Shard(number, count).path(str(output))} is missing"
            for number in islice(missing, _MAX_NAMED)
        ],
        count - len(numbers),
        output,
    )
    shards = (Shard(number, count) for number in range(1, count + 1))
    return [
        ShardFiles(
            shard,
            Path(shard.path(str(output))),
            None if errors is None else Path(shard.path(str(errors))),
        )
        for shard in shards
    ]


def _numbers_by_count(output: Path) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    pattern = re.compile(re.escape(output.name) + r"\.([1-9][0-9]{0,8})-of-([1-9][0-9]{0,8})")
    with suppress(FileNotFoundError, NotADirectoryError):
        for path in output.parent.iterdir():
            if (match := pattern.fullmatch(path.name)) and int(match[1]) <= int(match[2]):
                found.setdefault(int(match[2]), set()).add(int(match[1]))
    return found


def check_shards(shards: list[ShardFiles], output: Path, *, by_marks: bool) -> list[ShardMark]:
    """Raise Refused with the unfinished shards; otherwise return the marks, which match."""
    refusals, marks = [], []
    for each in shards:
        try:
            each.check_ended()
            if by_marks:
                marks.append(each.load_mark())
        except Refused as exc:
            refusals.append(str(exc))
    _refuse_all(refusals[:_MAX_NAMED], len(refusals), output)
    for (before, after), (one, other) in zip(pairwise(shards), pairwise(marks), strict=False):
        if one.lines.num_bytes != other.lines.num_bytes or one.lines.end != other.lines.first:
            raise Refused(
                f"{before.output} and {after.output} have different inputs, or their input changed "
                "between their runs: rerun the older one with --force"
            )
    return marks


def check_same_settings(
    output: Path, shards: Sequence[ShardFiles], settings: Sequence[RowSettings | None]
) -> None:
    """Raise Refused for shards that were run with different settings.

    Shards from older versions do not contain their settings, which is logged.
    """
    known = [
        (each, found.latest)
        for each, found in zip(shards, settings, strict=True)
        if found is not None and found.latest is not None and found.has_rows
    ]
    lines: list[str] = []
    for each, latest in known[1:]:
        first, expected = known[0]
        lines += describe(
            differences(expected, latest), f"in {first.output.name}", f"in {each.output.name}"
        )
    if lines:
        more = [f"  and {len(lines) - _MAX_NAMED:,} more"] if len(lines) > _MAX_NAMED else []
        head = f"{output} cannot be joined, because its shards were run with different settings:"
        way = "Rerun the shards that differ with --force, or join all with --allow-other-settings."
        raise Refused("\n".join((head, *lines[:_MAX_NAMED], *more, way)))
    if num_unknown := sum(found is None or found.latest is None for found in settings):
        log(
            f"note: the settings of {amount(num_unknown, 'shard')} are unknown, so they were not "
            "compared"
        )


def _refuse_all(named: list[str], num_all: int, output: Path) -> None:
    if not named:
        return
    more = [f"  and {num_all - len(named):,} more"] if num_all > len(named) else []
    refusals = [f"  {each}" for each in named]
    raise Refused("\n".join((f"{output} cannot be joined yet:", *refusals, *more)))
