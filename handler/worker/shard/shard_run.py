"""Shard run: runs one claimed shard from its input to its commit or early release."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from typing import Any, NamedTuple

from tidemill.batch.errors import HandlerError
from tidemill.batch.file.echoed_fields import EchoedFields, with_fields
from tidemill.batch.file.lines import RawLine
from tidemill.batch.model import BatchError
from tidemill.batch.parts import FinishedRow
from tidemill.batch.shard_cascade import ShardCascade
from tidemill.batch.states import Status
from tidemill.batch.suspects import Verdict
from tidemill.engine_process.frames import Row
from tidemill.protocol.contract import Usage

from ...aws.calls import Operation, T
from ...aws.items import dump
from ...aws.queues import advance_message
from ...errors import AwsError, LeaseLost, ObjectChanged
from ...observability import Metric, logger
from ..context.context import WorkerContext
from .claim import Claim, advance_if_done, continue_escalated
from .lease import Lease, guarded
from .line_order import LineOrder, block_hashes
from .pending_lines import PendingLines
from .rows import Unflushed, compact, print_unrun
from .shard_input import ShardInput
from .shard_meter import ShardMeter
from .shard_parts import ShardParts
from .shard_span import ShardSpan


class EarlyEnd(NamedTuple):
    """Reason to release a shard before all its lines have rows.

    With `is_resent` the shard's message is sent again, after `delay_seconds`, else a message for
    its batch.
    """

    reason: str
    is_resent: bool = False
    delay_seconds: float = 0
    verdict: Verdict | None = None


class RowsMissing(HandlerError):
    """A finished shard has fewer rows than lines; it must not be committed."""

    code = "rows_missing"


class ShardRun:
    """Run of one claimed shard. All its writes but lease renewals come from `work`, in order.

    `wake` is called when lines may be admitted. `check_machine` returns, before rows are written,
    whether the machine that computed them is healthy.
    """

    def __init__(
        self,
        claim: Claim,
        context: WorkerContext,
        order: LineOrder,
        wake: Callable[[], None],
        check_machine: Callable[[], Awaitable[bool]],
    ) -> None:
        self.shard = claim.shard
        self.batch = claim.batch
        self.message = claim.message
        self.lease = Lease(context.config.lease_seconds, claim.sent_at, context.clock)
        self.pending = PendingLines(())
        self._echoed: dict[int, bytes] = {}  # by the line of a row to come
        self.requests: set[asyncio.Task[None]] = set()
        self.is_open = False
        self.is_over = False
        self.span = ShardSpan(context.tracing, claim.batch, claim.shard)
        self.cascade = ShardCascade(claim.batch, claim.shard)
        self.meter = ShardMeter(claim, context)
        self._context = context
        self._order = order
        self._wake = wake
        self._check_machine = check_machine
        self._is_doubted = False  # rows were dropped: the machine is broken
        self._quarantined: tuple[int, ...] = ()
        self._unflushed = Unflushed()
        self._has_new_rows = False
        self._is_handing_over = False
        self._ending: EarlyEnd | None = None
        self._changed = asyncio.Event()
        self.labels: dict[str, Any] = {
            "batch_id": claim.shard.batch_id,
            "shard": claim.shard.number,
            "fence": claim.shard.fence,
        }
        self._input = ShardInput(claim, context, self.lease, self.labels)
        self._parts = ShardParts(claim, context, self.lease, self.labels)

    # State and events

    @property
    def num_waiting(self) -> int:
        """Number of lines that were not sent to the engine yet, as far as known."""
        return self.pending.num_waiting if self.is_open else self.shard.num_rows

    @property
    def num_held_bytes(self) -> int:
        """Bytes of unflushed rows."""
        return self._unflushed.num_bytes

    @property
    def is_ending(self) -> bool:
        """Return whether no line may be admitted any more."""
        return self._ending is not None or self.is_over or self.lease.is_over

    @property
    def attempts(self) -> int:
        """Number of claims, this one included, since rows were last made durable."""
        return 0 if self._has_new_rows else self.shard.attempts

    @property
    def attempts_if_lost(self) -> int:
        """Number of claims that count if the worker dies: those in which a line has run."""
        return max(0, self.attempts - (self.is_open and not self.pending.has_begun))

    def finish(self, raw: RawLine, row: Row) -> None:
        """Add the row of a line that the engine has answered."""
        self.meter.end_row()
        self.pending.finish(raw.number)
        self._context.emit_cold_start()
        is_draft = self.cascade.is_draft(raw, row.row)
        printed = self.cascade.row_of(raw, row.row)
        self._add(FinishedRow(raw.number, printed, row.is_success, row.usage, is_draft=is_draft))

    def lose_engine(self, lost: Collection[int], reason: str) -> None:
        """Make suspects of the lines that one of several engines had when it died.

        They run again on this machine; one that is quarantined gets its row.
        """
        verdict = self.judge(lost, reason)
        for line in self.pending.take_back(lost):
            row = print_unrun(line, is_quarantined=True)
            assert row is not None
            self._add(row)
        self._quarantined += verdict.quarantined
        self._wake()

    def judge(self, lost: Collection[int], reason: str) -> Verdict:
        """Return the suspects after the death of engines that had these lines, and log them."""
        verdict = self.pending.judge(lost) if self.is_open else Verdict(self.shard.suspects)
        suspects = [compact(group) for group in verdict.suspects]
        logger.error("engine died", reason=reason, suspects=suspects, **self.labels)
        for line in verdict.quarantined:
            logger.error("quarantined", line=line, **self.labels)
        return verdict

    def end(self, ending: EarlyEnd) -> None:
        """End the run early: flush finished rows and release the shard."""
        if self._ending is None:
            self._ending = ending
        self.abort()
        self._changed.set()

    def lose(self) -> None:
        """Drop everything: another worker has or may have the shard."""
        if not self._is_handing_over:  # the fencing token makes the write in progress fail
            self.lease.end()
            self.abort()
            self._changed.set()

    def abort(self) -> None:
        """Abort the requests in flight."""
        for request in self.requests:
            request.cancel()

    # The run

    async def work(self) -> None:
        """Run the shard to its end; an error ends only this shard, and releases it."""
        outcome = "cancelled"
        try:
            await self._open()
            await self._collect()
            if self._is_complete and not self.shard.is_escalated and self._parts.escalated:
                await self._escalate()
                outcome = "escalated"
            elif self._is_complete:
                await self._commit()
                outcome = "committed"
            else:
                await self._release()
                outcome = "released"
        except LeaseLost as exc:
            outcome = "lease_lost"
            self._note_loss(exc)
        except ObjectChanged as exc:
            outcome = "input_changed"
            await self._fail_batch(str(exc))
        except Exception as exc:  # noqa: BLE001 - one shard's failure must not stop the others
            outcome = "shard_failed"
            logger.exception("shard failed", **self.labels)
            await self._release_failed(repr(exc))
        finally:
            self.is_over = True
            self.abort()
            self.span.end(outcome, self.meter.durable)

    @property
    def _is_complete(self) -> bool:
        is_finished = self.pending.is_finished and not self._is_doubted
        return self.is_open and is_finished and not self._unflushed

    async def _open(self) -> None:
        parts = self._parts
        await parts.read(self._input, self.cascade)
        self.meter.durable = parts.progress
        done = parts.rows.lines if self.shard.is_escalated else parts.rows.lines | parts.escalated
        lines = await self._input.read_lines()
        if self.batch.options.echo_fields:
            echo = EchoedFields(self.batch.options.echo_fields, self.batch.vendor)
            lacking = [line for line in lines if line.number not in done]
            self._echoed = await asyncio.to_thread(
                lambda: {line.number: echo.of_line(line) for line in lacking}
            )
        logger.info(
            "claimed",
            kept_lines=len(parts.rows),
            kept=compact(parts.rows.lines),
            suspects=[compact(group) for group in self.shard.suspects],
            **self.labels,
        )
        to_run = []
        for line in lines:
            if line.number in done:
                continue
            unrun = print_unrun(line, is_quarantined=line.number in self.shard.quarantined)
            if unrun is None:
                to_run.append(line)
            else:
                self._add(unrun)
        refused = await self._input.refuse_media(to_run)
        if refused:
            for row in refused.values():
                self._add(row)
            to_run = [line for line in to_run if line.number not in refused]
        reused = await self._input.reuse_results([self.cascade.line_of(line) for line in to_run])
        by_number = {line.number: line for line in to_run} if reused else {}
        for row in reused:
            raw = by_number[row.line]
            is_draft = self.cascade.is_draft(raw, row.row)
            self._add(row._replace(row=self.cascade.row_of(raw, row.row), is_draft=is_draft))
        if reused:
            numbers = {row.line for row in reused}
            to_run = [line for line in to_run if line.number not in numbers]
        hashes = await asyncio.to_thread(lambda: [*map(block_hashes, to_run)])
        self.pending = PendingLines(to_run, self.shard.suspects, self._order.add(hashes))
        self.is_open = True
        self._wake()

    async def _collect(self) -> None:
        """Flush finished rows until all are durable or the run ends early."""
        config = self._context.config
        flush_seconds = config.flush_seconds_for(self.batch.num_shards)
        while not self._is_complete:
            self._changed.clear()
            is_last = self._ending is not None or self.pending.is_finished
            due_in = self._unflushed.due_in(
                self._context.clock(),
                flush_seconds=flush_seconds,
                flush_bytes=config.flush_bytes,
            )
            if due_in is not None and (is_last or due_in <= 0):
                await self._flush()
            elif is_last:
                return
            else:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), due_in)
                self.lease.check()

    async def _flush(self) -> None:
        if not await self._check_machine():
            self._is_doubted = True
            self._unflushed.drop(len(self._unflushed.rows), self._context.clock())
            self.end(EarlyEnd("this machine is broken", is_resent=True))
            return
        taken_at = self._context.clock()
        taken = tuple(self._unflushed.rows)
        rows = await self._input.with_first_answers(taken, self._parts.drafts, self.cascade)
        await self._parts.write(rows)
        self._unflushed.drop(len(rows), taken_at)
        self._has_new_rows = True
        self.meter.pace.add(len(rows), sum((row.usage for row in rows), start=Usage()))
        self.meter.durable = self._parts.progress
        self._wake()

    # Ends of the run

    async def _commit(self) -> None:
        bucket, table = self._context.deployment.bucket, self._context.deployment.table
        rows = self._parts.rows
        if len(rows) != self.shard.num_rows:
            raise RowsMissing(f"only {len(rows)} of {self.shard.num_rows} lines have a row")
        seal = rows.seal()
        await self._retry(lambda: bucket.put_segments(self.shard, seal))
        if self._ending is None:
            await self._input.keep_results(rows)
        self._is_handing_over = True
        progress = self.meter.progress.without_rates
        await self._retry(
            lambda: table.commit(
                self.shard,
                progress=progress,
                output_sizes=[segment.num_bytes for segment in seal.output],
                error_sizes=[segment.num_bytes for segment in seal.errors],
            )
        )
        self.meter.record(progress)
        logger.info(
            "committed", completed=progress.completed, failed=progress.failed, **self.labels
        )
        try:
            if await advance_if_done(self._context, self.shard.batch_id):
                self.span.add_batch()
            await self.message.delete()
        except AwsError as exc:  # the message reappears and is handled then
            logger.warning("message left to its timeout", reason=str(exc), **self.labels)

    async def _escalate(self) -> None:
        """Leave the lines that have only a draft to the workers of the batch's second model."""
        if self._ending is None:
            await self._input.keep_results(self._parts.rows)
            await self._input.keep_results(self._parts.drafts)
        self._is_handing_over = True
        progress, lines = self.meter.progress.without_rates, compact(self._parts.escalated)
        table = self._context.deployment.table
        await self._retry(
            lambda: table.release(
                self.shard,
                progress=progress,
                suspects=(),
                quarantined=(),
                attempts=0,
                is_escalated=True,
            )
        )
        self.meter.record(progress)
        logger.info("escalated", lines=lines, **self.labels)
        try:
            await continue_escalated(self._context, self.batch, self.shard)
            await self.message.delete()
        except AwsError as exc:  # the message reappears, and the next one is sent then
            logger.warning("message left to its timeout", reason=str(exc), **self.labels)

    async def _release(self) -> None:
        ending = self._ending
        assert ending is not None
        await self._give_back(ending, max(0, self.attempts - 1))
        try:
            if ending.is_resent:
                await self.message.resend(ending.delay_seconds)
            else:
                message, tenant = advance_message(self.shard.batch_id), self.batch.tenant
                control = self._context.deployment.control
                await self._context.retry(lambda: control.send(message, group=tenant))
                await self.message.delete()
        except AwsError as exc:
            logger.warning("message left to its timeout", reason=str(exc), **self.labels)

    async def _release_failed(self, reason: str) -> None:
        """Release the shard and leave its message to the visibility timeout."""
        try:
            await self._give_back(EarlyEnd(reason), self.attempts)
        except LeaseLost as exc:
            self._note_loss(exc)
        except HandlerError as exc:
            logger.warning("lease left to expire", reason=str(exc), **self.labels)

    async def _fail_batch(self, reason: str) -> None:
        """Fail a batch whose input has changed since its validation."""
        batch, table = self.batch, self._context.deployment.table
        error = BatchError(ObjectChanged.code, "The input was deleted or changed during the run.")
        logger.error("input changed", reason=reason, **self.labels)
        try:
            await self._retry(
                lambda: table.move_batch(
                    batch.id,
                    Status.FINALIZING,
                    int(self._context.wall()),
                    outcome=str(Status.FAILED),
                    errors=[dump(one) for one in (*batch.errors, error)],
                    num_errors=batch.num_errors + 1,
                )
            )
            self._ending = EarlyEnd("input changed")
            await self._release()
        except LeaseLost as exc:
            self._note_loss(exc)
        except HandlerError as exc:
            logger.warning("lease left to expire", reason=str(exc), **self.labels)

    async def _give_back(self, ending: EarlyEnd, attempts: int) -> None:
        verdict = ending.verdict or Verdict(
            self.pending.suspects if self.is_open else self.shard.suspects
        )
        suspects, quarantined = verdict.suspects, (*self._quarantined, *verdict.quarantined)
        if self._is_doubted:  # the machine may have been the cause
            suspects, quarantined = (*((line,) for line in quarantined), *suspects), ()
        self._is_handing_over = True
        progress = self.meter.progress.without_rates
        await self._retry(
            lambda: self._context.deployment.table.release(
                self.shard,
                progress=progress,
                suspects=suspects,
                quarantined=(*self.shard.quarantined, *quarantined),
                attempts=attempts,
            )
        )
        self.meter.record(progress)
        logger.info("released", reason=ending.reason, **self.labels)

    # Helpers

    def _note_loss(self, exc: LeaseLost) -> None:
        logger.warning("lease lost", reason=str(exc), **self.labels)
        self._context.emit({Metric.LEASES_LOST: 1}, batch_id=self.batch.id, shard=self.shard.number)

    def _add(self, row: FinishedRow) -> None:
        if self._echoed:
            row = row._replace(row=with_fields(row.row, self._echoed.pop(row.line, b"")))
        is_first = not self._unflushed
        self._unflushed.add(row, self._context.clock())
        is_due = self._unflushed.num_bytes >= self._context.config.flush_bytes
        if is_first or is_due or self.pending.is_finished:
            self._changed.set()

    async def _retry(self, make: Callable[[], Operation[T]]) -> T:
        """Run an operation, retried when AWS fails, with a check of the lease before each call."""
        return await self._context.retry(lambda: guarded(make(), self.lease.check))
