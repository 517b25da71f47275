"""What is remembered of a file between two runs of intake."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import TypeAdapter

from engine.batchfile.forms import Form
from handler.batch.check import Findings
from handler.batch.cutter import ShardCutter
from handler.intake.repeated import Search


@dataclass(slots=True)
class Checkpoint:
    """All that is kept between two runs.

    The next line begins at byte `offset`, after `num_lines` lines, blank ones counted. The ids seen
    before are in the bucket, in one object for each of `ids`: the bytes at which a run stopped.
    `search` is how far those of the whole file have been looked through for repeated ones.
    `form` is that of the input; where it is not plain, `upload` is what it is made plain by, and
    `num_vain` how many runs, one after another, have come no further with that.
    """

    cutter: ShardCutter
    findings: Findings = field(default_factory=Findings)
    offset: int = 0
    num_lines: int = 0
    ids: list[int] = field(default_factory=list)
    search: Search = field(default_factory=Search)
    form: Form = field(default_factory=Form)
    upload: str | None = None
    num_vain: int = 0


_adapter = TypeAdapter(Checkpoint)


def dump_checkpoint(checkpoint: Checkpoint) -> str:
    """Return it as text for the batch."""
    return _adapter.dump_json(checkpoint).decode()


def load_checkpoint(text: str) -> Checkpoint:
    """Return what `dump_checkpoint` was given."""
    return _adapter.validate_json(text)
