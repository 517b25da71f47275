"""The end of a batch, when others move it too."""

from __future__ import annotations

import time
from typing import Any

import pytest

from handler.aws.calls import Operation
from handler.batch.states import Status
from handler.moves import end as ending
from tests.emulators import Emulator
from tests.handler.intake.rig import Cloud, lines_of


def test_an_end_does_not_jump_over_what_came_meanwhile(
    ministack: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that expired while it was read, and passes after all, has rows to be seen to."""
    cloud = Cloud.on(ministack)
    batch = cloud.create(lines_of(3))
    write = ending._write_report

    def pass_first(*arguments: Any) -> Operation[None]:
        cloud.take_in(batch)
        return (yield from write(*arguments))

    monkeypatch.setattr(ending, "_write_report", pass_first)
    ended = cloud.run(ending.end(cloud.deployment, batch.id, Status.EXPIRED, int(time.time())))
    assert ended.status is cloud.batch(batch.id).status is Status.IN_PROGRESS
