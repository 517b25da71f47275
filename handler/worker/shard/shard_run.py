"""One claimed shard, from its input to its commit, or to whatever ends it before."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from tempfile import SpooledTemporaryFile
from typing import Any, NamedTuple

from engine.batchfile.lines import RawLine, read_lines
from engine.batchfile.pace import Pace
from engine.contract import Usage
from engine.process.frames import Row
from handler.aws.bucket import read_range
from handler.aws.calls import Operation, T
from handler.aws.items import dump
from handler.aws.queues import advance_message
from handler.batch.model import BatchError, Progress
from handler.batch.parts import FinishedRow, PartIndex, decode_index, encode_part
from handler.batch.states import Status
from handler.errors import AwsError, HandlerError, LeaseLost, NotThere, ObjectChanged
from handler.log import logger
from handler.metrics import Metric
from handler.worker.shard.agenda import Agenda, Verdict
from handler.worker.shard.claim import Claim, ring_if_last
from handler.worker.shard.lease import Lease, guarded
from handler.worker.shard.rows import Unflushed, compact, print_unrun
from handler.worker.site.site import Site

# A shard is read in one piece; a longer one is a single line, of which only the digest is kept.
_READ_BYTES = 64 * 2**20


class Ending(NamedTuple):
    """Why a shard is given back before all its lines have rows.

    `is_rung` says that its own message comes again at once; otherwise the batch is rung for.
    """

    reason: str
    is_rung: bool = False
    verdict: Verdict | None = None


class ShardRun:
    """What a worker does for one shard. All its writes but renewals come from `work`, in order.

    `wake` is called when lines may be admitted; `prove` says before rows are written whether the
    machine that they come from is well.
    """

    def __init__(
        self,
        claim: Claim,
        site: Site,
        wake: Callable[[], None],
        prove: Callable[[], Awaitable[bool]],
    ) -> None:
        self.shard = claim.shard
        self.batch = claim.batch
        self.doorbell = claim.doorbell
        self.lease = Lease(site.config.lease_seconds, claim.sent_at, site.clock)
        self.agenda = Agenda(())
        self.requests: set[asyncio.Task[None]] = set()
        self.is_open = False
        self.is_over = False
        self.gpu_seconds = claim.shard.progress.gpu_seconds
        self._site = site
        self._wake = wake
        self._prove = prove
        self._is_doubted = False  # rows were dropped: the machine is broken
        self._index = PartIndex()
        self._unflushed = Unflushed()
        self._durable = claim.shard.progress.at_rest
        self._told = claim.shard.progress
        earlier = site.paces.pop(claim.shard.batch_id, None)
        self.pace = Pace(site.clock) if earlier is None else earlier
        self._part_numbers = count()
        self._has_new_rows = False
        self._is_handing_over = False
        self._ending: Ending | None = None
        self._changed = asyncio.Event()
        self.labels: dict[str, Any] = {
            "batch_id": claim.shard.batch_id,
            "shard": claim.shard.number,
            "fence": claim.shard.fence,
        }

    # What others see and say

    @property
    def num_waiting(self) -> int:
        """Lines that were not given to the engine yet, as far as is known."""
        return self.agenda.num_waiting if self.is_open else self.shard.num_rows

    @property
    def num_held_bytes(self) -> int:
        """Bytes of rows that are finished and not durable."""
        return self._unflushed.num_bytes

    @property
    def is_ending(self) -> bool:
        """Say whether no line may be admitted any more."""
        return self._ending is not None or self.is_over or self.lease.is_over

    @property
    def progress(self) -> Progress:
        """Return what is durable, the time that it took, and how fast it grows."""
        rates = self.pace.rates._asdict()
        return replace(self._durable, gpu_seconds=round(self.gpu_seconds, 3), **rates)

    @property
    def attempts(self) -> int:
        """Claims, with this one, since rows were last made durable."""
        return 0 if self._has_new_rows else self.shard.attempts

    def told(self, progress: Progress) -> None:
        """Take note that the table has this progress, and count what nobody has told it before.

        Answers may come in another order than they were given: what is older adds nothing.
        """
        new = progress.since(self._told)
        self._told += new
        self._site.meter.count(new)
        self._site.tempo.count(new)
        self._site.history.count(self.batch, new, self._site.wall())

    def finish(self, raw: RawLine, row: Row) -> None:
        """Take the row of a line that the engine has answered."""
        self.agenda.finish(raw.number)
        self._site.tell_cold_start()
        self._add(FinishedRow(raw.number, row.row, row.is_success, row.usage))

    def end(self, ending: Ending) -> None:
        """Run no further line: make finished rows durable and give the shard back."""
        if self._ending is None:
            self._ending = ending
        self.abort()
        self._changed.set()

    def lose(self) -> None:
        """Drop everything: another worker has the shard, or may have it."""
        if not self._is_handing_over:  # what is being written finds that out itself
            self.lease.end()
            self.abort()
            self._changed.set()

    def abort(self) -> None:
        """Take back the requests that are with the engine."""
        for request in self.requests:
            request.cancel()

    # Its life

    async def work(self) -> None:
        """Run the shard to its end; whatever goes wrong ends this shard alone."""
        try:
            await self._open()
            await self._collect()
            if self._is_complete:
                await self._commit()
            else:
                await self._release()
        except LeaseLost as exc:
            self._note_loss(exc)
        except ObjectChanged as exc:
            await self._fail_batch(str(exc))
        except Exception as exc:  # noqa: BLE001 - one shard's misfortune must not stop the others
            logger.exception("shard failed", **self.labels)
            await self._release_failed(repr(exc))
        finally:
            self.is_over = True
            self.abort()

    @property
    def _is_complete(self) -> bool:
        is_finished = self.agenda.is_finished and not self._is_doubted
        return self.is_open and is_finished and not self._unflushed

    async def _open(self) -> None:
        self._index = await self._read_parts()
        self._durable = self._index.progress()
        lines = await self._read_input()
        logger.info(
            "claimed",
            kept_lines=len(self._index),
            kept=compact(self._index.lines),
            suspects=[compact(group) for group in self.shard.suspects],
            **self.labels,
        )
        to_run = []
        for line in lines:
            if line.number in self._index:
                continue
            unrun = print_unrun(line, is_quarantined=line.number in self.shard.quarantined)
            if unrun is None:
                to_run.append(line)
            else:
                self._add(unrun)
        self.agenda = Agenda(to_run, self.shard.suspects)
        self.is_open = True
        self._wake()

    async def _read_parts(self) -> PartIndex:
        def left_out(key: str, reason: str) -> None:
            logger.error("part left out", key=key, reason=reason, **self.labels)

        bucket, shard = self._site.deployment.bucket, self.shard
        return await self._insist(
            lambda: bucket.index_parts(shard.batch_id, shard.number, left_out=left_out)
        )

    async def _read_input(self) -> list[RawLine]:
        """Return the lines of the shard; raises ObjectChanged when they are no longer there."""
        shard = self.shard
        with SpooledTemporaryFile(max_size=_READ_BYTES) as file:
            for start in range(shard.start, shard.end, _READ_BYTES):
                end = min(start + _READ_BYTES, shard.end)
                make = partial(read_range, self.batch.source, start, end)
                try:
                    file.write(await self._insist(make))
                except NotThere as exc:
                    raise ObjectChanged("the object is not there any more") from exc
            file.seek(0)
            lines = list(read_lines(file, first_number=shard.first_line))
        if len(lines) != shard.num_rows:
            raise ObjectChanged(f"{len(lines)} lines are where {shard.num_rows} were counted")
        return lines

    async def _collect(self) -> None:
        """Make rows durable as they are finished, until all are or the run is to end."""
        config = self._site.config
        while not self._is_complete:
            self._changed.clear()
            is_last = self._ending is not None or self.agenda.is_finished
            due_in = self._unflushed.due_in(
                self._site.clock(),
                flush_seconds=config.flush_seconds,
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
        if not await self._prove():
            self._is_doubted = True
            self._unflushed.drop(len(self._unflushed.rows), self._site.clock())
            self.end(Ending("this machine is broken", is_rung=True))
            return
        taken_at = self._site.clock()
        rows = tuple(self._unflushed.rows)
        data = encode_part(rows)
        bucket = self._site.deployment.bucket
        # A new number for each try: a part that was written is never changed.
        key = await self._insist(
            lambda: bucket.put_part(self.shard, next(self._part_numbers), data)
        )
        self._index.add(key, decode_index(data))
        self._unflushed.drop(len(rows), taken_at)
        self._has_new_rows = True
        self.pace.add(len(rows), sum((row.usage for row in rows), start=Usage()))
        self._durable = self._index.progress()
        logger.info(
            "part written",
            key=key,
            num_rows=len(rows),
            num_bytes=len(data),
            lines=compact(row.line for row in rows),
            **self.labels,
        )
        self._wake()

    # Its ends

    async def _commit(self) -> None:
        bucket, table = self._site.deployment.bucket, self._site.deployment.table
        seal = self._index.seal()
        await self._insist(lambda: bucket.put_segments(self.shard, seal))
        self._is_handing_over = True
        progress = self.progress.at_rest
        await self._insist(
            lambda: table.commit(
                self.shard,
                progress=progress,
                output_sizes=[segment.num_bytes for segment in seal.output],
                error_sizes=[segment.num_bytes for segment in seal.errors],
            )
        )
        self.told(progress)
        logger.info(
            "committed", completed=progress.completed, failed=progress.failed, **self.labels
        )
        try:
            await ring_if_last(self._site, self.shard.batch_id)
            await self.doorbell.dismiss()
        except AwsError as exc:  # the message comes again and is answered then
            logger.warning("message left behind", reason=str(exc), **self.labels)

    async def _release(self) -> None:
        ending = self._ending
        assert ending is not None
        await self._give_back(ending, max(0, self.attempts - 1))
        try:
            if ending.is_rung:
                await self.doorbell.ring_again()
            else:
                message, tenant = advance_message(self.shard.batch_id), self.batch.tenant
                control = self._site.deployment.control
                await self._site.insist(lambda: control.send(message, group=tenant))
                await self.doorbell.dismiss()
        except AwsError as exc:
            logger.warning("message left behind", reason=str(exc), **self.labels)

    async def _release_failed(self, reason: str) -> None:
        """Give the shard back and leave its message, which comes again after a while."""
        try:
            await self._give_back(Ending(reason), self.attempts)
        except LeaseLost as exc:
            self._note_loss(exc)
        except HandlerError as exc:
            logger.warning("lease left to end", reason=str(exc), **self.labels)

    async def _fail_batch(self, reason: str) -> None:
        """End a batch whose input is no longer what was validated."""
        batch, table = self.batch, self._site.deployment.table
        error = BatchError(ObjectChanged.code, "The input was deleted or changed during the run.")
        logger.error("input changed", reason=reason, **self.labels)
        try:
            await self._insist(
                lambda: table.move_batch(
                    batch.id,
                    Status.FINALIZING,
                    int(self._site.wall()),
                    outcome=str(Status.FAILED),
                    errors=[dump(one) for one in (*batch.errors, error)],
                    num_errors=batch.num_errors + 1,
                )
            )
            self._ending = Ending("input changed")
            await self._release()
        except LeaseLost as exc:
            self._note_loss(exc)
        except HandlerError as exc:
            logger.warning("lease left to end", reason=str(exc), **self.labels)

    async def _give_back(self, ending: Ending, attempts: int) -> None:
        verdict = ending.verdict or Verdict(
            self.agenda.suspects if self.is_open else self.shard.suspects
        )
        self._is_handing_over = True
        progress = self.progress.at_rest
        await self._insist(
            lambda: self._site.deployment.table.release(
                self.shard,
                progress=progress,
                suspects=verdict.suspects,
                quarantined=(*self.shard.quarantined, *verdict.quarantined),
                attempts=attempts,
            )
        )
        self.told(progress)
        logger.info("released", reason=ending.reason, **self.labels)

    # What they are made of

    def _note_loss(self, exc: LeaseLost) -> None:
        logger.warning("lease lost", reason=str(exc), **self.labels)
        self._site.tell({Metric.LEASES_LOST: 1}, batch_id=self.batch.id, shard=self.shard.number)

    def _add(self, row: FinishedRow) -> None:
        is_first = not self._unflushed
        self._unflushed.add(row, self._site.clock())
        is_due = self._unflushed.num_bytes >= self._site.config.flush_bytes
        if is_first or is_due or self.agenda.is_finished:
            self._changed.set()

    async def _insist(self, make: Callable[[], Operation[T]]) -> T:
        """Run an operation, again when AWS fails, with a look at the lease before each call."""
        return await self._site.insist(lambda: guarded(make(), self.lease.check))
