"""From an object to shards that can be run, in one run or in many.

The whole file is looked at before anything of it runs. What is remembered between two runs has a
fixed size, but for the custom ids, which go to the bucket. A shard is recorded as soon as it is
cut; it is rung for only when the file has been found good.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from tempfile import TemporaryFile

from engine.batchfile.duplicates import DuplicateFinder, Duplicates
from engine.batchfile.forms import HEAD_BYTES, form_of
from engine.batchfile.lines import FormError, read_lines, refuse_endless
from handler.aws.bucket import read_range
from handler.aws.queues import advance_message
from handler.aws.sync import Aws
from handler.batch.check import (
    NOT_JSON,
    LineChecker,
    Verdict,
    judge,
    refuse,
)
from handler.batch.cutter import ShardCutter
from handler.batch.keys import ids_key, is_drop, plain_key
from handler.batch.model import Batch, Shard
from handler.batch.states import Status
from handler.batch.wire import MAX_LISTED_ERRORS
from handler.deployment import Deployment
from handler.errors import HandlerError, NotThere, ObjectChanged
from handler.intake.checkpoint import Checkpoint, dump_checkpoint, load_checkpoint
from handler.intake.convert import give_up, make_plain
from handler.intake.repeated import find_saved
from handler.intake.shards import ShardWriter
from handler.log import logger
from handler.moves.announce import announce
from handler.moves.end import end_batch
from handler.moves.turn import RESERVE_SECONDS, TURN_SECONDS, ComeBack, Run, TurnLost
from handler.objects.stream import CHUNK_BYTES, LineStream, ObjectStream

_AFTER_SECONDS = TURN_SECONDS + 5
# What the custom ids of so many lines take at the end of a run.
_SAVED_PER_SECOND = 1_000_000


class FileRefused(HandlerError):
    """The file cannot be run, whatever else stands in it."""

    code = "file_refused"

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.errors[0].message)
        self.verdict = verdict


def take_in(
    aws: Aws,
    deployment: Deployment,
    batch: Batch,
    time_left: Callable[[], float],
    *,
    now: Callable[[], float] = time.time,
    chunk_bytes: int = CHUNK_BYTES,
) -> Batch:
    """Bring a batch that is validating to `in_progress` or `failed`, or as far as the time allows.

    `time_left` gives the seconds until the run must have ended. Returns the batch as it is then,
    when that is done or a message is on its way that goes on with it.
    """
    run = Run(aws, deployment, batch, time_left, now)
    if not run.take_turn():
        logger.info("another run has the batch", batch_id=batch.id)
        # It may have died: somebody must come when its turn has ended.
        aws.run(deployment.control.send(advance_message(batch.id), delay_seconds=_AFTER_SECONDS))
        return run.batch
    is_unfinished = False
    try:
        _go_on(run, chunk_bytes)
    except ComeBack:
        is_unfinished = True
    except TurnLost as exc:
        logger.info("intake stops", batch_id=batch.id, reason=str(exc))
        is_unfinished = True
    finally:
        begun = run.batch
        run.give_turn()
    if run.batch.status is not Status.VALIDATING:
        give_up(aws, deployment, begun)
    # Only now: whoever hears it must find the turn free.
    if is_unfinished:
        aws.run(deployment.control.send(advance_message(batch.id)))
    return run.batch


def _go_on(run: Run, chunk_bytes: int) -> None:
    batch = run.batch
    if batch.status is not Status.VALIDATING:
        return
    if batch.errors:
        _fail(run, Verdict(batch.num_errors, batch.errors))
        return
    try:
        checkpoint = _begin(run)
        verdict = _look_at_file(run, checkpoint, chunk_bytes)
    except FileRefused as exc:
        _fail(run, exc.verdict)
        return
    except FormError as exc:
        _fail(run, refuse(NOT_JSON, exc.message))
        return
    if verdict.num_errors:
        _fail(run, verdict)
    else:
        _pass(run, checkpoint)


def _begin(run: Run) -> Checkpoint:
    """Return where the run before stopped, or the beginning, of a source that is plain JSONL."""
    text = run.batch.checkpoint
    try:
        checkpoint = _first_look(run) if text is None else load_checkpoint(text)
        if checkpoint.upload is not None and run.batch.original is None:
            make_plain(run, checkpoint, checkpoint.upload)
    except (ObjectChanged, NotThere) as exc:
        raise _unreadable(exc) from exc
    return checkpoint


def _first_look(run: Run) -> Checkpoint:
    """Return the beginning, with the limits that hold for the whole file; raises FormError."""
    batch, bucket = run.batch, run.deployment.bucket
    form = form_of(
        run.aws.run(read_range(batch.source, 0, min(HEAD_BYTES, batch.source.num_bytes)))
    )
    limits = run.deployment.settings.shard_limits.of_file(batch.source.num_bytes)
    first = Checkpoint(ShardCutter(batch.id, limits), form=form)
    if not form.is_plain:
        first.upload = run.aws.run(bucket.create_upload(plain_key(batch.id), {}))
    text = dump_checkpoint(first)
    chosen = run.aws.run(run.deployment.table.set_once(batch.id, "checkpoint", text))
    if chosen != text and first.upload is not None:
        run.aws.run(bucket.abort_upload(plain_key(batch.id), first.upload))
    run.batch = replace(run.batch, checkpoint=chosen)
    return load_checkpoint(chosen)


def _unreadable(cause: HandlerError) -> FileRefused:
    if isinstance(cause, NotThere):
        return FileRefused(refuse("input_gone", "The input was deleted before it was read."))
    return FileRefused(refuse(ObjectChanged.code, "The input was changed while it was read."))


def _look_at_file(run: Run, checkpoint: Checkpoint, chunk_bytes: int) -> Verdict:
    with DuplicateFinder() as finder:
        reading = _Reading(run, checkpoint, finder, chunk_bytes)
        reading.read()
        duplicates = reading.find_repeated()
    return judge(
        checkpoint.findings,
        duplicates,
        mistake=checkpoint.form.suspicion,
        on_invalid_line=run.batch.options.on_invalid_line,
        unit=checkpoint.form.unit,
    )


@dataclass(slots=True)
class _Reading:
    """One run over the file, from the checkpoint on."""

    run: Run
    checkpoint: Checkpoint
    finder: DuplicateFinder
    chunk_bytes: int
    lines: LineStream = field(init=False)
    _rows_before: int = field(init=False)

    def read(self) -> None:
        """Read to the end of the file and record its shards; raises ComeBack, with a checkpoint."""
        checkpoint, source = self.checkpoint, self.run.batch.source
        stream = ObjectStream(self.run.aws, source, checkpoint.offset)
        self.lines = LineStream(
            stream,
            start=checkpoint.offset,
            num_lines=checkpoint.num_lines,
            look=self._look,
            chunk_bytes=self.chunk_bytes,
        )
        self._rows_before = checkpoint.findings.num_rows
        with ShardWriter(self._put_shard) as writer:
            try:
                self._read_lines(writer)
            except ComeBack:
                writer.drain()
                self._stop_at(self.lines.end)
                raise
            except (ObjectChanged, NotThere) as exc:
                raise _unreadable(exc) from exc
            finally:
                stream.close()
            writer.drain()

    def _read_lines(self, writer: ShardWriter) -> None:
        batch, lines = self.run.batch, self.lines
        findings, cutter = self.checkpoint.findings, self.checkpoint.cutter
        checker = LineChecker(
            findings,
            models=self.run.deployment.models,
            endpoint=_endpoint_of_all(self.run),
            add_id=self.finder.add,
        )

        def write(shard: Shard | None) -> None:
            # The shards of a file that is known to be wrong will never be run.
            is_refused = findings.num_errors and batch.options.on_invalid_line == "fail"
            if shard is not None and not is_refused:
                writer.write(shard)

        for raw in read_lines(lines, first_number=lines.num_lines + 1):
            checker.check(raw)
            write(cutter.add(raw.number, lines.line_start, lines.tell()))
        write(cutter.finish())

    def _put_shard(self, shard: Shard) -> None:
        shard = replace(shard, expires=self.run.batch.expires)
        self.run.aws.run(self.run.deployment.table.put_shard(shard))

    def find_repeated(self) -> Duplicates:
        """Find repeated ids: among those at hand if they are all, else in what all runs have left.

        Raises ComeBack, with a checkpoint.
        """
        checkpoint, end = self.checkpoint, self.run.batch.source.num_bytes
        has_read = checkpoint.offset < end
        if not checkpoint.ids:
            try:
                return self.finder.find(MAX_LISTED_ERRORS, self._look_while_searching)
            except ComeBack:
                self._stop_at(end)
                raise
        if has_read:
            self._stop_at(end)
        return find_saved(
            self.run,
            checkpoint.ids,
            checkpoint.search,
            num_ids=checkpoint.findings.num_rows,
            has_progressed=has_read,
            look=self.run.stay,
            keep=self._keep,
        )

    def _look(self) -> None:
        """See, before each chunk, whether to go on; every run gets at least one line further."""
        lines = self.lines
        self.run.stay()
        refuse_endless(lines.num_lines + 1, lines.tell() - lines.end)
        if self._is_late() and lines.end > self.checkpoint.offset:
            raise ComeBack

    def _look_while_searching(self) -> None:
        self.run.stay()
        if self._is_late():
            raise ComeBack

    def _is_late(self) -> bool:
        """Say whether there is time only to save the ids that are at hand."""
        num_new = self.checkpoint.findings.num_rows - self._rows_before
        return self.run.time_left() < RESERVE_SECONDS + num_new / _SAVED_PER_SECOND

    def _stop_at(self, offset: int) -> None:
        """Record that all before a byte of the file has been looked at."""
        run, checkpoint = self.run, self.checkpoint
        # A run that was held up for long must not write over the ids of the one that came after it.
        run.keep_turn()
        with TemporaryFile() as saved:
            self.finder.save(saved)
            saved.seek(0)
            run.aws.run(run.deployment.bucket.put(ids_key(run.batch.id, offset), saved))
        checkpoint.ids.append(offset)
        checkpoint.offset, checkpoint.num_lines = offset, self.lines.num_lines
        self._keep()
        logger.info(
            "intake has come so far",
            batch_id=run.batch.id,
            num_rows=checkpoint.findings.num_rows,
            offset=offset,
            num_bytes=run.batch.source.num_bytes,
        )

    def _keep(self) -> None:
        """Record how far this has come; raises TurnLost when another run goes on with it."""
        self.run.keep_turn()
        self.run.change(checkpoint=dump_checkpoint(self.checkpoint), failing_since=None)


def _endpoint_of_all(run: Run) -> str | None:
    """Return what the urls of all lines must mean, if anything: an upload does not say."""
    is_strict = run.deployment.settings.strict_endpoint and not is_drop(run.batch.outputs)
    return run.batch.endpoint if is_strict else None


def _fail(run: Run, verdict: Verdict) -> None:
    logger.info("file refused", batch_id=run.batch.id, num_errors=verdict.num_errors)
    end_batch(
        run.aws,
        run.deployment,
        run.batch.id,
        Status.FAILED,
        int(run.now()),
        errors=verdict.errors,
        num_errors=verdict.num_errors,
        checkpoint=None,
    )


def _pass(run: Run, checkpoint: Checkpoint) -> None:
    """Let the shards be run, unless the batch has been cancelled or has expired meanwhile.

    A file whose lines are more than its tenant may queue is refused.
    """
    batch, findings = run.batch, checkpoint.findings
    excess = run.aws.run(run.deployment.limits.queue_lines(batch, findings.num_rows))
    if excess is not None:
        _fail(run, Verdict(1, (excess,)))
        return
    moved = run.aws.run(
        run.deployment.table.move_batch(
            batch.id,
            Status.IN_PROGRESS,
            int(run.now()),
            model=findings.model,
            endpoint=findings.endpoint if is_drop(batch.outputs) else batch.endpoint,
            num_rows=findings.num_rows,
            num_shards=checkpoint.cutter.number,
            shards_left=checkpoint.cutter.number,
            checkpoint=None,
        )
    )
    if not moved.is_there or moved.batch is None:
        raise TurnLost(f"{batch.id} is no longer validating")
    logger.info(
        "file taken in",
        batch_id=batch.id,
        model=findings.model,
        num_rows=findings.num_rows,
        num_shards=checkpoint.cutter.number,
    )
    run.aws.run(announce(run.deployment, moved.batch))
