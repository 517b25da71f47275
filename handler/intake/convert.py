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

from engine.batchfile.forms import Form, as_lines
from engine.batchfile.lines import FormError
from handler.aws.items import dump
from handler.batch.keys import plain_key
from handler.batch.model import Source
from handler.errors import HandlerError, NotThere
from handler.log import logger
from handler.moves.turn import ComeBack, Run
from handler.objects.stream import CHUNK_BYTES, ObjectStream
from handler.objects.upload_plan import MAX_PARTS

PART_BYTES = 16 * 2**20

_NUM_THREADS = 2
# A run that had so long for nothing but what was there before will never come further.
_FAIR_SECONDS = 300
_NO_UPLOAD = "NoSuchUpload"


def make_plain(run: Run, form: Form, upload_id: str) -> None:
    """Convert the input of a batch to JSONL and make that its source.

    Raises FormError for an input that is damaged or too long, ComeBack when the time is nearly
    over, TurnLost, ObjectChanged and NotThere.
    """
    bucket, original, key = run.deployment.bucket, run.batch.source, plain_key(run.batch.id)
    try:
        etags = _send(run, form, upload_id)
        run.keep_turn()
        run.aws.run(bucket.complete_upload(key, upload_id, etags))
    except FormError:
        run.aws.run(bucket.abort_upload(key, upload_id))
        raise
    except NotThere as exc:
        if exc.aws_code != _NO_UPLOAD:
            raise
        # A run before this one has completed it, and died.
    found = run.aws.run(bucket.head(key))
    if found is None:
        raise HandlerError(f"{key} is gone")
    plain = Source(bucket.name, key, found["ETag"], found["ContentLength"])
    run.change(source=dump(plain), original=dump(original))
    logger.info("made plain", batch_id=run.batch.id, key=original.key, num_bytes=plain.num_bytes)


def _send(run: Run, form: Form, upload_id: str) -> dict[int, str]:
    """Send what is not there yet and return the ETags of all parts."""
    bucket, key = run.deployment.bucket, plain_key(run.batch.id)
    there = run.aws.run(bucket.list_uploaded(key, upload_id))
    seconds = run.time_left()
    etags: dict[int, str] = {}
    pending: deque[tuple[int, Future[str]]] = deque()

    def send(number: int, part: bytes) -> str:
        return run.aws.run(bucket.upload_part(key, upload_id, number, io.BytesIO(part)))

    def collect(limit: int) -> None:
        while len(pending) > limit:
            number, sent = pending.popleft()
            etags[number] = sent.result()

    stream = ObjectStream(run.aws, run.batch.source)
    pieces = iter(lambda: stream.read(CHUNK_BYTES), b"")
    with closing(stream), ThreadPoolExecutor(_NUM_THREADS) as pool:
        for number, part in enumerate(_parts(as_lines(form, pieces)), 1):
            _check(run, is_hopeless=number <= len(there) + 1 and seconds > _FAIR_SECONDS)
            etag, num_bytes = there.get(number, ("", -1))
            if num_bytes == len(part):
                etags[number] = etag
            elif number > MAX_PARTS:
                raise _too_long()
            else:
                pending.append((number, pool.submit(send, number, part)))
                collect(_NUM_THREADS - 1)
        collect(0)
    return etags


def _check(run: Run, *, is_hopeless: bool) -> None:
    """Keep the turn; raises ComeBack when the time is nearly over, but not again and again."""
    try:
        run.check()
    except ComeBack:
        if is_hopeless:
            raise _too_long() from None
        raise


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
