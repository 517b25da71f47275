"""What happens to a batch that winds up: close its shards, publish, deliver, report, end.

Every step looks first at what is done, so a run may die anywhere, and a message may come twice: the
next run ends in the same state. A run whose time is over rings for the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.hosts.network import Network
from handler.aws.queues import advance_message
from handler.aws.sync import Aws
from handler.batch.model import Batch
from handler.batch.states import Status
from handler.deployment import Deployment
from handler.finalize.close import close_shards
from handler.finalize.deliver import deliver
from handler.finalize.publish import publish
from handler.log import logger
from handler.moves.end import end_batch
from handler.moves.turn import ComeBack, Run, TurnLost


def finalize(
    aws: Aws,
    deployment: Deployment,
    batch: Batch,
    time_left: Callable[[], float],
    *,
    now: Callable[[], float] = time.time,
    network: Network | None = None,
) -> None:
    """Bring a batch that is `finalizing` or `cancelling` as far as the time allows.

    `time_left` gives the seconds until the run must have ended. Returns when the batch is terminal,
    when a message is on its way that goes on with it, or when another run has it: that one rings.
    """
    run = Run(aws, deployment, batch, time_left, now)
    if not run.take_turn():
        logger.info("another run has the batch", batch_id=batch.id)
        return
    delay_seconds: float | None = None
    try:
        _go_on(run, network)
    except ComeBack as pause:
        delay_seconds = pause.delay_seconds
    except TurnLost as exc:
        logger.info("another run has the batch now", batch_id=batch.id, reason=str(exc))
    finally:
        run.give_turn()
    # Only now: whoever hears it must find the turn free.
    if delay_seconds is not None:
        message, tenant = advance_message(batch.id), batch.tenant
        aws.run(deployment.control.send(message, group=tenant, delay_seconds=delay_seconds))


def _go_on(run: Run, network: Network | None) -> None:
    batch = run.batch
    if batch.status not in {Status.FINALIZING, Status.CANCELLING}:
        return
    if batch.final is None:
        close_shards(run)
        publish(run)
    deliver(run, network)
    outcome = run.batch.outcome or Status.COMPLETED
    status = Status.CANCELLED if batch.status is Status.CANCELLING else outcome
    run.keep_turn()
    end_batch(run.aws, run.deployment, batch.id, status, int(run.now()))
