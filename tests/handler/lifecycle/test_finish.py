"""The end of a batch, when others move it too."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.emulators import Emulator
from tests.handler.intake.rig import Cloud, lines_of
from tidemill.batch.states import Status
from tidemill.handler.aws.calls import Operation
from tidemill.handler.lifecycle import finish as ending


def test_an_end_does_not_jump_over_what_came_meanwhile(
    ministack: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that expired while it was read, and passes after all, has rows to be seen to."""
    cloud = Cloud.on(ministack)
    batch = cloud.create(lines_of(3))
    write = ending._write_report

    def pass_first(*arguments: Any) -> Operation[None]:
        cloud.ingest(batch)
        return (yield from write(*arguments))

    monkeypatch.setattr(ending, "_write_report", pass_first)
    ended = cloud.run(ending.end(cloud.deployment, batch.id, Status.EXPIRED, int(time.time())))
    assert ended.status is cloud.batch(batch.id).status is Status.IN_PROGRESS
