"""The engine's process from its worker's side: frames in, frames out, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, TypeVar

import pytest
import pytest_asyncio

from tests.test_imports import MODEL_LIBRARIES, modules_loaded_by
from tidemill.batch.file.lines import RawLine
from tidemill.engine_process.exchange import ExchangeRequest, answer_request, encode_request
from tidemill.engine_process.frames import (
    Abort,
    Answer,
    AnswerKind,
    Ask,
    Failed,
    Frame,
    FrameReader,
    FrameWriter,
    Ready,
    Row,
    Run,
    Stats,
    encode_frame,
    open_wire,
)
from tidemill.protocol.contract import Usage

SCRIPT = Path(__file__).parent / "scripted_engine.py"
PATIENCE_SECONDS = 120  # far more than anything here takes: reached only when something hangs

_Found = TypeVar("_Found", bound=Frame)


def line(**body: Any) -> bytes:
    """Return a line whose body is the script for the engine."""
    return json.dumps({"custom_id": "a", "url": "/v1/x", "body": body}).encode()


class Child:
    """A scripted engine's process and the other ends of its pipes."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: FrameWriter,
    ) -> None:
        self.process = process
        self.reader = FrameReader(reader)
        self.unread = deque[Frame]()
        self.writer = writer

    def send(self, *frames: Frame) -> None:
        """Send frames."""
        for frame in frames:
            self.writer.write(frame)

    async def next(self, kind: type[_Found] | UnionType) -> _Found:
        """Return the next frame of a kind and skip others."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                if not self.unread:
                    self.unread.extend(await self.reader.read())
                assert self.unread, "the process has ended"
                frame = self.unread.popleft()
                if isinstance(frame, kind):
                    return frame

    async def rows(self, count: int) -> dict[int, Row]:
        """Return the next rows by their tickets."""
        rows = [await self.next(Row) for _ in range(count)]
        return {row.ticket: row for row in rows}

    async def exit_status(self) -> int:
        """Wait for the process to end."""
        return await asyncio.wait_for(self.process.wait(), PATIENCE_SECONDS)


Start = Callable[..., Awaitable[Child]]


@pytest_asyncio.fixture
async def start() -> AsyncIterator[Start]:
    """Return a function that starts a scripted engine with these arguments."""
    children: list[Child] = []

    async def start_one(*arguments: object, **streams: Any) -> Child:
        child_reader, writer = os.pipe()
        reader, child_writer = os.pipe()
        fds = ["--reader-fd", str(child_reader), "--writer-fd", str(child_writer)]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(SCRIPT),
            *fds,
            *map(str, arguments),
            pass_fds=(child_reader, child_writer),
            **streams,
        )
        os.close(child_reader)
        os.close(child_writer)
        children.append(Child(process, *await open_wire(reader, writer)))
        return children[-1]

    yield start_one
    for child in children:
        if child.process.returncode is None:
            child.process.kill()
        await child.process.wait()
        child.writer.close()
        while await child.reader._stream.read(2**16):
            pass


async def test_it_sends_its_info_and_then_statistics(start: Start) -> None:
    """It first reports once that it is ready, then sends statistics repeatedly."""
    child = await start("--stats-seconds", 0.01)
    kinds = [type(await child.next(Ready | Stats)) for _ in range(4)]
    assert kinds == [Ready, Stats, Stats, Stats]


async def test_each_line_gets_its_row_and_its_cost(start: Start) -> None:
    """The row contains the line's IDs and the time from the frame."""
    child = await start()
    data = line(say=1)
    child.send(Run(7, 3, 1_700_000_000, data))
    row = await child.next(Row)
    shown = json.loads(row.row)
    assert (row.ticket, row.is_success) == (7, True)
    assert row.usage == Usage(10, 4, 3)
    assert shown["id"] == f"batch_req_{RawLine(3, data).digest}"
    assert shown["response"]["body"]["created"] == 1_700_000_000
    assert shown["response"]["body"]["echo"] == {"say": 1}


async def test_requests_run_concurrently(start: Start) -> None:
    """A long request does not delay the others, and each batch has its own time."""
    child = await start()
    child.send(Run(1, 1, 0, line(wait=600)), *(Run(n, n, n, line()) for n in range(2, 500)))
    rows = await child.rows(498)
    assert sorted(rows) == list(range(2, 500))
    for ticket, row in rows.items():
        assert json.loads(row.row)["response"]["body"]["created"] == ticket


async def test_sent_rows_of_a_stream_are_freed(start: Start) -> None:
    """With a constant number of requests in flight, memory does not grow."""
    child = await start()
    data = line(vector=2_000)
    child.send(*(Run(number, number, 0, data) for number in range(256)))
    peaks, num_bytes = [], 0
    for number in range(256, 1_500):
        num_bytes += len((await child.next(Row)).row)
        child.send(Run(number, number, 0, data))
        if number % 250 == 0:
            peaks.append(peak_bytes(child.process.pid))
    assert peaks[-1] - peaks[0] < num_bytes / 3


def peak_bytes(pid: int) -> int:
    """Return the peak resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(peak.split()[1]) * 1024


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (line(status=404), 404),
        (line(**{"raise": "boom"}), 500),
        (b"no json", None),
    ],
)
async def test_a_failed_line_has_a_row_and_no_cost(
    start: Start, data: bytes, status: int | None
) -> None:
    """The process continues."""
    child = await start()
    child.send(Run(1, 1, 0, data), Run(2, 2, 0, line()))
    rows = await child.rows(2)
    response = json.loads(rows[1].row)["response"]
    assert (rows[1].is_success, rows[1].usage, rows[2].is_success) == (False, Usage(), True)
    assert (response and response["status_code"]) == status


async def test_an_aborted_request_is_dropped_and_makes_room(start: Start) -> None:
    """Its row never arrives, and a waiting request runs."""
    child = await start("--slots", 1)
    child.send(Run(1, 1, 0, line(wait=600)), Run(2, 2, 0, line()), Run(3, 3, 0, line(wait=600)))
    child.send(Abort(1), Abort(3), Abort(99), Run(4, 4, 0, line()))
    assert [(await child.next(Row)).ticket for _ in range(2)] == [2, 4]
    child.send(Abort(2), Run(5, 5, 0, line()))
    assert (await child.next(Row)).ticket == 5


@pytest.mark.parametrize("load_seconds", [0, 600])
async def test_it_exits_cleanly_when_the_other_side_closes_its_pipe(
    start: Start, load_seconds: int
) -> None:
    """It holds with requests in flight, and even while the model still loads."""
    child = await start("--load-seconds", load_seconds)
    if not load_seconds:
        child.send(Run(1, 1, 0, line(wait=600)))
        await child.next(Ready)
    child.writer.close()
    assert await child.exit_status() == 0


async def test_an_incomplete_frame_ends_it(start: Start) -> None:
    """Its sender was killed."""
    child = await start()
    await child.next(Ready)
    child.writer._stream.write(encode_frame(Run(1, 1, 0, line()))[:-3])
    child.writer.close()
    assert "truncated" in (await child.next(Failed)).message
    assert await child.exit_status() == 3


async def test_an_engine_that_cannot_be_loaded_reports_why(start: Start) -> None:
    """The reason is in its own words, for the user."""
    child = await start("--refuse", "jamba: not a decoder")
    assert await child.next(Failed) == Failed("jamba: not a decoder", "engine_error")
    assert await child.exit_status() == 3


async def test_an_engine_that_fails_reports_why(start: Start) -> None:
    """Rows that finished before arrive first; the others never arrive."""
    child = await start()
    child.send(Run(1, 1, 0, line()))
    assert (await child.next(Row)).is_success
    child.send(Run(2, 2, 0, line(wait=600)), Run(3, 3, 0, line(fail="the device is gone")))
    assert await child.next(Failed) == Failed("the device is gone", "engine_error")
    assert await child.exit_status() == 3


async def test_an_unexpected_frame_ends_it(start: Start) -> None:
    """Two programs that do not understand each other must not continue."""
    child = await start()
    child.send(Stats((await child.next(Stats)).stats))
    assert "Stats frame must not be sent to an engine" in (await child.next(Failed)).message
    assert await child.exit_status() == 3


async def test_a_hanging_engine_stops_counting_steps(start: Start) -> None:
    """Statistics continue; before the hang, they count steps."""
    child = await start("--stats-seconds", 0.01)
    child.send(Run(1, 1, 0, line(wait=600)))
    first = await child.next(Stats)
    while (await child.next(Stats)).stats.steps < first.stats.steps + 3:
        pass
    child.send(Run(2, 2, 0, line(hang=True)))
    steps = -1
    same = 0
    while same < 5:
        stats = (await child.next(Stats)).stats
        same = same + 1 if stats.steps == steps else 0
        steps = stats.steps
    assert stats.running == 2


async def test_printed_output_is_not_parsed_as_frames(start: Start) -> None:
    """Libraries print, but not into the pipes."""
    streams = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    child = await start("--say", "Loading weights", **streams)
    child.send(Run(1, 1, 0, line()))
    assert (await child.next(Row)).is_success
    child.writer.close()
    out, err = await asyncio.wait_for(child.process.communicate(), PATIENCE_SECONDS)
    assert (out, err) == (b"Loading weights", b"Loading weights")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_termination_signals_are_left_to_the_worker(
    start: Start, number: signal.Signals
) -> None:
    """The engine continues until its pipe closes."""
    child = await start()
    await child.next(Ready)
    child.process.send_signal(number)
    child.send(Run(1, 1, 0, line()))
    assert (await child.next(Row)).is_success


def test_a_process_without_a_model_loads_no_model_library() -> None:
    """The caller chooses the engine; the wire protocol does not import model libraries."""
    assert modules_loaded_by("import tidemill.engine_process.child") & MODEL_LIBRARIES == set()


async def test_a_request_whose_reply_is_cancelled_in_the_engine_is_answered() -> None:
    """Its client would wait for ever; a request that its client has cancelled ends instead."""

    class Served:
        async def respond(self, *_: object) -> NoReturn:
            if is_cancelled_inside:
                raise asyncio.CancelledError
            await asyncio.Future()

    async def send(answer: Answer) -> None:
        answers.append(answer)

    answers: list[Answer] = []
    served: Any = Served()
    ask = Ask(1, 0, is_online=False, data=encode_request(ExchangeRequest("/v1/x", {}, "req_1")))
    is_cancelled_inside = True
    await answer_request(served, ask, send)
    assert answers == [Answer(1, AnswerKind.FAULT, b"CancelledError: ")]
    is_cancelled_inside = False
    answering = asyncio.create_task(answer_request(served, ask, send))
    await asyncio.sleep(0)
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering
    assert len(answers) == 1
