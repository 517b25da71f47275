"""What is no plain JSONL is made plain once, into the work of its batch, where all others read it.

A multipart upload, so that another run goes on with it: that one reads the input from its start
again, for nobody can go on in the middle of gzip, and sends only what is not there yet.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

from engine.batchfile.forms import as_lines
from engine.batchfile.lines import FormError
from handler.aws.items import dump
from handler.aws.sync import Aws
from handler.batch.keys import plain_key
from handler.batch.model import Batch, Conversion, Source
from handler.batch.parts import MAX_PARTS
from handler.deployment import Deployment
from handler.errors import NotThere
from handler.log import logger
from handler.moves.turn import RESERVE_SECONDS, ComeBack, Run
from handler.objects.stream import CHUNK_BYTES, ObjectStream

PART_BYTES = 16 * 2**20

_NUM_THREADS = 2
# A run that had so long for nothing but what was there before has come no further in vain: so has
# one that S3 was slow for, but not so many one after another.
_FAIR_SECONDS = 300
_MAX_VAIN = 3
_NO_UPLOAD = "NoSuchUpload"


def make_plain(run: Run, conversion: Conversion) -> None:
    """Convert the input of a batch to JSONL and make that its source.

    Raises FormError for an input that is damaged or too long, ComeBack when the time is nearly
    over, TurnLost, ObjectChanged and NotThere. The upload stays, for the batch has not ended yet.
    """
    bucket, original, key = run.deployment.bucket, run.batch.source, plain_key(run.batch.id)
    try:
        etags = _send(run, conversion)
        run.keep_turn()
        run.aws.run(bucket.complete_upload(key, conversion.upload, etags))
    except NotThere as exc:
        if exc.aws_code != _NO_UPLOAD:
            raise
        # A run before this one has completed it, and died; or somebody has aborted it.
    found = run.aws.run(bucket.head(key))
    if found is None:
        logger.warning("upload gone", batch_id=run.batch.id, key=key)
        run.keep_turn()
        run.change(conversion=None)
        raise ComeBack
    plain = Source(bucket.name, key, found["ETag"], found["ContentLength"])
    run.change(source=dump(plain), original=dump(original), failing_since=None)
    logger.info("made plain", batch_id=run.batch.id, key=original.key, num_bytes=plain.num_bytes)


def give_up(aws: Aws, deployment: Deployment, batch: Batch) -> None:
    """Abort the upload of a batch that has ended before it was plain, by what it was before.

    Not earlier: another run would find no upload, and not what is wrong with the file.
    """
    if batch.conversion is not None and batch.original is None:
        aws.run(deployment.bucket.abort_upload(plain_key(batch.id), batch.conversion.upload))


def _send(run: Run, conversion: Conversion) -> dict[int, str]:
    """Send what is not there yet and return the ETags of all parts."""
    bucket, key, upload_id = run.deployment.bucket, plain_key(run.batch.id), conversion.upload
    there = run.aws.run(bucket.list_uploaded(key, upload_id))
    has_time = run.time_left() > _FAIR_SECONDS
    etags: dict[int, str] = {}
    pending: deque[tuple[int, Future[str]]] = deque()

    def send(number: int, part: bytes) -> str:
        return run.aws.run(bucket.upload_part(key, upload_id, number, io.BytesIO(part)))

    def collect(limit: int) -> None:
        while len(pending) > limit:
            number, sent = pending.popleft()
            etags[number] = sent.result()
            if run.batch.failing_since is not None:
                run.change(failing_since=None)

    stream = ObjectStream(run.aws, run.batch.source)
    pieces = iter(lambda: stream.read(CHUNK_BYTES), b"")
    lines = _looked_at(run, as_lines(conversion.form, pieces))
    with closing(stream), ThreadPoolExecutor(_NUM_THREADS) as pool:
        try:
            for number, part in enumerate(_parts(lines), 1):
                _look(run)
                etag, num_bytes = there.get(number, ("", -1))
                if num_bytes == len(part):
                    etags[number] = etag
                elif number > MAX_PARTS:
                    raise _too_long()
                else:
                    pending.append((number, pool.submit(send, number, part)))
                    collect(_NUM_THREADS - 1)
        except ComeBack:
            collect(0)
            has_come_further = bool(etags.keys() - there.keys())
            if has_time or has_come_further:
                _keep(run, conversion, 0 if has_come_further else conversion.num_vain + 1)
            raise
        collect(0)
    return etags


def _looked_at(run: Run, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the pieces that are not empty: a part may take very many of the others."""
    for piece in pieces:
        if piece:
            yield piece
        else:
            _look(run)


def _look(run: Run) -> None:
    """Keep the turn; raises ComeBack when the time is nearly over, TurnLost."""
    run.stay()
    if run.time_left() < RESERVE_SECONDS:
        raise ComeBack


def _keep(run: Run, conversion: Conversion, num_vain: int) -> None:
    """Record how many runs have come no further; raises FormError where they are too many."""
    run.keep_turn()
    if num_vain == _MAX_VAIN:
        raise _too_long()
    if num_vain != conversion.num_vain:
        run.change(conversion=dump(replace(conversion, num_vain=num_vain)))


def _parts(pieces: Iterable[bytes]) -> Iterator[bytes]:
    r"""Yield the bytes in parts of one size and a last shorter one; of none a blank line."""
    buffer = bytearray()
    is_first = True
    for piece in pieces:
        buffer += piece
        while len(buffer) >= PART_BYTES:
            yield bytes(buffer[:PART_BYTES])
            del buffer[:PART_BYTES]
            is_first = False
    if buffer or is_first:
        yield bytes(buffer) or b"\n"


def _too_long() -> FormError:
    return FormError(
        "The file is too long to be unpacked here: split it, or upload it as plain JSONL."
    )
