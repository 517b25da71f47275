"""Intake progress of a file: phases and the work units left, shared by many runs. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from .file.formats import FileFormat
from .shard_cutter import ShardLimits

RANGE_BYTES = 256 * 2**20
# So many ranges at most has a file: those of a longer one are longer.
_MAX_RANGES = 4096
# What lines take does not depend on their bytes alone: of so many that are no requests, or blank, a
# run may have some minutes.
MAX_LINES = 2**23


class Phase(StrEnum):
    """Ranges are scanned, some of them again; then ids are searched and shards recorded at once.

    Those last two are one phase, which is called by the first.
    """

    SCAN = "scan"
    AGAIN = "again"
    SEARCH = "search"
    RECORD = "record"


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """A piece of work that one run does: the `number`th (from 0) of its phase.

    A range that has very many lines is scanned in parts, one behind the other.
    """

    phase: Phase
    number: int
    part: int = 0

    @classmethod
    def named(cls, name: str) -> WorkUnit:
        """Return the unit of a name; raises ValueError."""
        phase, *numbers = name.split("-")
        return cls(Phase(phase), *map(int, numbers))

    def __str__(self) -> str:
        """Return its name, by which messages and objects know it."""
        name = f"{self.phase}-{self.number}"
        return f"{name}-{self.part}" if self.part else name

    @property
    def rest(self) -> WorkUnit:
        """Return the unit that goes on where this one has stopped."""
        return replace(self, part=self.part + 1)


@dataclass(frozen=True, slots=True)
class IntakeProgress:
    """Intake progress of one file: the settings of all runs, and the units `left` of its phase.

    `limits` and `range_bytes` are those it was begun with: another version of the deployment may
    have others; so it is with `max_lines`, after which a scan stops. `is_rung` once somebody has
    rung for all units of the phase. `model` is the file's where ranges are scanned again for it.
    From `expires` on the table forgets it.
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
        """Return the beginning of a phase."""
        left = frozenset(map(str, units))
        return replace(self, phase=phase, left=left, is_rung=False, model=model or self.model)

    @property
    def num_ranges(self) -> int:
        """Return into how many ranges the file is divided, at least one."""
        return max(1, -(-self.num_bytes // self.range_bytes))

    def range_of(self, number: int) -> tuple[int, int]:
        """Return the first byte of a range, and the one behind it."""
        start = number * self.range_bytes
        return start, min(start + self.range_bytes, self.num_bytes)


def new_progress(
    form: FileFormat, limits: ShardLimits, num_bytes: int, range_bytes: int, expires: int | None
) -> IntakeProgress:
    """Return the beginning with a file of so many bytes, its ranges still to be scanned."""
    reading = IntakeProgress(
        form,
        limits.for_file(num_bytes),
        max(range_bytes, -(-num_bytes // _MAX_RANGES)),
        num_bytes,
        expires=expires,
    )
    scans = [WorkUnit(Phase.SCAN, number) for number in range(reading.num_ranges)]
    return replace(reading, left=frozenset(map(str, scans)))
