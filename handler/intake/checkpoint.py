"""How far intake has come with a file, so that another run can go on as if there were one."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import TypeAdapter

from handler.batch.cutter import ShardCutter
from handler.intake.check import Findings


@dataclass(slots=True)
class Checkpoint:
    """All that is kept between two runs.

    The next line begins at byte `offset`, after `num_lines` lines, blank ones counted. The ids seen
    before are in the bucket, in one object for each of `ids`: the bytes at which a run stopped.
    `mistake` is what the beginning of the file looks like if no line turns out to be a request.
    """

    cutter: ShardCutter
    findings: Findings = field(default_factory=Findings)
    offset: int = 0
    num_lines: int = 0
    ids: list[int] = field(default_factory=list)
    mistake: str | None = None


_adapter = TypeAdapter(Checkpoint)


def dump_checkpoint(checkpoint: Checkpoint) -> str:
    """Return it as text for the batch."""
    return _adapter.dump_json(checkpoint).decode()


def load_checkpoint(text: str) -> Checkpoint:
    """Return what `dump_checkpoint` was given."""
    return _adapter.validate_json(text)
