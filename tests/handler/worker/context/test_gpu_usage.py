"""GPU time that workers add to a day's usage."""

from __future__ import annotations

import time

import pytest

from tests.handler.worker.fakes import FaultyAws, QuickAws
from tests.handler.worker.rig import Rig
from tidemill.handler.aws.calls import Call
from tidemill.handler.aws.stores.usage import EVERYBODY
from tidemill.handler.errors import AwsError
from tidemill.handler.worker.context.context import WorkerContext


@pytest.mark.parametrize("failing", [1, 2, 3])
async def test_what_was_written_before_a_failure_is_not_written_again(
    rig: Rig, failing: int
) -> None:
    """Whichever of the writes fails: those of two tenants, and that of everybody."""
    num_writes, now = 0, time.time()

    def refuse(call: Call) -> Exception | None:
        nonlocal num_writes
        num_writes += call.method == "update_item"
        return AwsError("injected") if num_writes == failing else None

    async with QuickAws() as aws:
        faulty = FaultyAws(aws, refuse)
        context = WorkerContext(
            faulty, rig.deployment, rig.queue, rig.config(), wall=lambda: now, clock=lambda: 0.0
        )
        context.gpu_usage.add("a", 10.0)
        context.gpu_usage.add("b", 5.0)
        with pytest.raises(AwsError, match="injected"):
            await context.write_gpu_usage()
        await context.write_gpu_usage()
        days = [
            await aws.run(rig.deployment.usage.gpu_seconds_today(tenant, now))
            for tenant in ("a", "b", EVERYBODY)
        ]
    assert days == [10, 5, 15]
    assert num_writes == 4
