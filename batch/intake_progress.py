"""Intake progress of a file: phases and remaining work units, shared by many runs. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from .file.formats import FileFormat
from .shard_cutter import ShardLimits

RANGE_BYTES = 256 * 2**20
# Maximum number of ranges in a file: longer files have longer ranges.
_MAX_RANGES = 4096
# The time for lines does not depend on their bytes alone: this number of invalid or blank lines
# may take a run some minutes.
MAX_LINES = 2**23


class Phase(StrEnum):
    """Phases of intake: scan the ranges, scan some again, search the IDs, record the shards.

    The last two are one phase, which `SEARCH` starts.
    """

    SCAN = "scan"
    AGAIN = "again"
    SEARCH = "search"
    RECORD = "record"


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """A unit of work for one run: the `number`th (from 0) of its phase.

    A range with very many lines is scanned in parts, one after another.
    """

    phase: Phase
    number: int
    part: int = 0

    @classmethod
    def named(cls, name: str) -> WorkUnit:
        """Parse the name of a unit; raises ValueError."""
        phase, *numbers = name.split("-")
        return cls(Phase(phase), *map(int, numbers))

    def __str__(self) -> str:
        """Return its name in messages and object keys."""
        name = f"{self.phase}-{self.number}"
        return f"{name}-{self.part}" if self.part else name

    @property
    def rest(self) -> WorkUnit:
        """Return the unit for the rest of this one's range."""
        return replace(self, part=self.part + 1)


@dataclass(frozen=True, slots=True)
class IntakeProgress:
    """Intake progress of one file: the settings of all runs, and the units `left` of its phase.

    `limits`, `range_bytes` and `max_lines` (where a scan stops) are those of its start, because
    another version of the deployment may have others. `is_rung` is set once messages for all units
    of the phase are sent. `model` is the file's model when ranges are scanned again for it.
    From `expires` on the table may delete it.
    """

    form: FileFormat
    limits: ShardLimits
    range_bytes: int
    num_bytes: int
    max_lines: int = MAX_LINES
    left: frozenset[str] = field(default_factory=frozenset)
    phase: Phase = Phase.SCAN
    is_rung: bool = False
    model: str | None = None
    expires: int | None = None

    def in_phase(
        self, phase: Phase, units: Iterable[WorkUnit], model: str | None = None
    ) -> IntakeProgress:
        """Return the start of a phase."""
        left = frozenset(map(str, units))
        return replace(self, phase=phase, left=left, is_rung=False, model=model or self.model)

    @property
    def num_ranges(self) -> int:
        """Return the number of ranges of the file, at least one."""
        return max(1, -(-self.num_bytes // self.range_bytes))

    def range_of(self, number: int) -> tuple[int, int]:
        """Return the first byte of a range, and the one after its end."""
        start = number * self.range_bytes
        return start, min(start + self.range_bytes, self.num_bytes)


def new_progress(
    form: FileFormat, limits: ShardLimits, num_bytes: int, range_bytes: int, expires: int | None
) -> IntakeProgress:
    """Return the progress of a new file, with all its ranges still to be scanned."""
    reading = IntakeProgress(
        form,
        limits.for_file(num_bytes),
        max(range_bytes, -(-num_bytes // _MAX_RANGES)),
        num_bytes,
        expires=expires,
    )
    scans = [WorkUnit(Phase.SCAN, number) for number in range(reading.num_ranges)]
    return replace(reading, left=frozenset(map(str, scans)))
