"""The worker's side of its engine: rows arrive, and every kind of death is reported."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.engine_process.scripted_engine import ScriptedEngine
from tidemill.batch.file.lines import RawLine
from tidemill.batch.file.run_line import run_line
from tidemill.engine_process import client as link_module
from tidemill.engine_process import frames
from tidemill.engine_process.client import EngineClient, EngineDied, EngineFailed
from tidemill.engine_process.frames import FrameError, Row, Stats
from tidemill.protocol.contract import EngineInfo, EngineStats, Usage

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "scripted_engine.py"
PATIENCE_SECONDS = 120  # far more than anything here takes: reached only when something hangs
FAST_STATS = ("--stats-seconds", 0.05)
NEVER = 600

MakeLink = Callable[..., EngineClient]


def line(**body: Any) -> bytes:
    """Return a line whose body is the script for the engine."""
    return json.dumps({"custom_id": "a", "url": "/v1/x", "body": body}).encode()


@pytest_asyncio.fixture
async def make_client() -> AsyncIterator[MakeLink]:
    """Return a function that creates a client of a scripted engine with these arguments."""
    links: list[EngineClient] = []

    def make(
        *arguments: object,
        command: list[str] | None = None,
        stall_seconds: float = PATIENCE_SECONDS,
        start_seconds: float = PATIENCE_SECONDS,
        folders: asyncio.Future[Mapping[str, str]] | None = None,
    ) -> EngineClient:
        whole = [*(command or [sys.executable, str(SCRIPT)]), *map(str, arguments)]
        links.append(
            EngineClient(
                whole, stall_seconds=stall_seconds, start_seconds=start_seconds, folders=folders
            )
        )
        return links[-1]

    yield make
    for client in links:
        client._kill("the test is over")
        await client.close()


async def ask(client: EngineClient, number: int = 1, created: int = 0, **body: Any) -> Row:
    """Request a row, with a time limit."""
    return await asyncio.wait_for(client.fetch_row(number, created, line(**body)), PATIENCE_SECONDS)


def send(client: EngineClient, **body: Any) -> asyncio.Task[Row]:
    """Request a row in a new task."""
    return asyncio.create_task(ask(client, **body))


async def until(condition: Callable[[], bool]) -> None:
    """Wait for another process."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - the other process has no access to our event loop
            await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def group_is_alive(pid: int) -> bool:
    """Return whether any process of the group that this process led still runs."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = path.read_text(encoding="utf-8").rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(group) == pid and state != "Z":
            return True
    return False


async def test_it_starts_the_engine_and_reports_its_model(make_client: MakeLink) -> None:
    """The report comes once the model is loaded, not before."""
    client = make_client("--load-seconds", 0.1)
    assert await client.start() == EngineInfo("scripted", "r1", "test", "cpu", 0, 64)


async def test_a_row_depends_only_on_its_line(make_client: MakeLink) -> None:
    """A row over the wire equals, to the byte, the same line's row without one."""
    client = make_client()
    await client.start()
    for number, data in enumerate([line(x="é"), line(status=404), b"no json"], start=5):
        row = await client.fetch_row(number, 17, data)
        alone = await run_line(RawLine(number, data), ScriptedEngine(), created=17)
        assert (row.row, row.is_success) == (alone.row, alone.is_success)
        assert row.usage == (alone.usage or Usage())


async def test_concurrent_tasks_each_get_their_own_row(make_client: MakeLink) -> None:
    """It holds for any number of tasks and any order of answers."""
    client = make_client()
    await client.start()
    waits = [number % 7 / 500 for number in range(2_000)]
    tasks = [send(client, number=n, wait=wait) for n, wait in enumerate(waits, start=1)]
    for number, row in enumerate(await asyncio.gather(*tasks), start=1):
        digest = RawLine(number, line(wait=waits[number - 1])).digest
        assert json.loads(row.row)["id"] == f"batch_req_{digest}"
    assert client.inflight == 0


async def test_lines_longer_than_a_pipe_buffer_are_sent(make_client: MakeLink) -> None:
    """They flow both ways at once, and neither side waits for the other forever."""
    client = make_client()
    await client.start()
    texts = [letter * 3_000_000 for letter in "abcdefgh"]
    rows = await asyncio.gather(*(ask(client, text=text) for text in texts))
    echoed = [json.loads(row.row)["response"]["body"]["echo"]["text"] for row in rows]
    assert echoed == texts


async def test_a_line_larger_than_a_frame_is_refused(
    make_client: MakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine never receives it and continues."""
    client = make_client()
    await client.start()
    monkeypatch.setattr(frames, "MAX_PAYLOAD_BYTES", 1_000)
    with pytest.raises(FrameError, match="too long"):
        await ask(client, text="x" * 1_000)
    assert client.inflight == 0
    assert (await ask(client)).is_success


async def test_a_canceled_request_is_withdrawn(make_client: MakeLink, tmp_path: Path) -> None:
    """The engine drops it, so that waiting requests run."""
    journal = tmp_path / "journal"
    client = make_client("--slots", 1, "--log", journal)
    await client.start()
    first = send(client, wait=NEVER, custom_id="first")
    second = send(client, custom_id="second")
    await until(lambda: "first\tstarted" in journal.read_text(encoding="utf-8"))
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (await second).is_success
    assert client.inflight == 0
    events = [one.split("\t")[:2] for one in journal.read_text(encoding="utf-8").splitlines()]
    assert events == [["first", "started"], ["second", "started"], ["second", "finished"]]


async def test_statistics_are_current(make_client: MakeLink) -> None:
    """They contain the running requests and the number of steps."""
    client = make_client(*FAST_STATS)
    await client.start()
    waiting = send(client, wait=NEVER)
    await until(lambda: client.stats.running == 1 and client.stats.steps > 2)
    waiting.cancel()
    await until(lambda: client.stats.running == 0)


async def test_a_killed_engine_fails_all_waiting_requests(make_client: MakeLink) -> None:
    """Later requests fail, too; finished rows are unchanged."""
    client = make_client()
    await client.start()
    assert (await ask(client)).is_success
    tasks = [send(client, wait=NEVER) for _ in range(5)] + [send(client, die=True)]
    for task in tasks:
        with pytest.raises(EngineDied, match=r"^killed by SIGKILL$") as caught:
            await task
        assert (caught.value.reason, caught.value.was_sent) == ("killed by SIGKILL", True)
    assert (client.inflight, client.death) == (0, "killed by SIGKILL")
    with pytest.raises(EngineDied, match="SIGKILL") as caught:
        await ask(client)
    assert not caught.value.was_sent


async def test_a_request_since_the_pipe_was_closed_was_not_sent(make_client: MakeLink) -> None:
    """It is not a suspect; the earlier one is."""
    client = make_client()
    await client.start()
    before = send(client, wait=NEVER)
    await until(lambda: client.inflight == 1)
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)
    assert (client._writer.is_closing(), client.death) == (True, None)
    row = client.fetch_row(2, 0, line())
    exchange = asyncio.ensure_future(anext(client.ask(b"", 0, is_online=True)))
    for pending, was_sent in ((before, True), (row, False), (exchange, False)):
        with pytest.raises(EngineDied) as caught:
            await asyncio.wait_for(pending, PATIENCE_SECONDS)
        assert caught.value.was_sent is was_sent
    await closing


async def test_an_engine_failure_is_reported_in_its_words(make_client: MakeLink) -> None:
    """The words are for the log and its readers."""
    client = make_client()
    await client.start()
    waiting = send(client, wait=NEVER)
    with pytest.raises(EngineDied, match=r"^the device is gone$") as caught:
        await ask(client, fail="the device is gone")
    assert not caught.value.is_broken
    with pytest.raises(EngineDied, match=r"^the device is gone$"):
        await waiting


async def test_an_engine_can_blame_the_machine_instead_of_a_line(make_client: MakeLink) -> None:
    """Later requests also get the error that blames the machine."""
    client = make_client()
    await client.start()
    waiting = send(client, wait=NEVER)
    for pending in (ask(client, fail="8 steps failed", machine=True), waiting, ask(client)):
        with pytest.raises(EngineDied, match="8 steps failed") as caught:
            await pending
        assert caught.value.is_broken


# The scripts below get the ends of the pipes that they inherit.
FDS = "import os, sys, time\nreader, writer = (int(a.split('=')[1]) for a in sys.argv[1:3])\n"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("os.write(writer, b'Loading weights' * 9999); os.read(reader, 1)", "broken wire: a frame"),
        ("os.write(writer, b'Loading weights'); time.sleep(600)", "broken wire: a frame"),
        ("os.write(writer, b'\\0\\0\\0\\7\\1torn'); sys.exit(7)", "exited with status 7"),
        ("os.close(writer); time.sleep(600)", "closed its pipe"),
        ("os.fork() or time.sleep(600); sys.exit(7)", "exited with status 7"),
    ],
)
async def test_a_misbehaving_engine_is_ended(
    make_client: MakeLink, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    """Invalid data, half a frame or a pipe that closes too early or late never causes a hang."""
    monkeypatch.setattr(link_module, "_EXIT_SECONDS", 0.3)
    client = make_client(command=[sys.executable, "-c", FDS + script])
    with pytest.raises(EngineFailed, match=words):
        await client.start()
    await until(lambda: not group_is_alive(client._process.pid))


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (["--refuse", "jamba: not a decoder"], "^jamba: not a decoder$", "engine_error"),
        (["--no-such-flag-but-ignored", "--slots", "x"], "^exited with status 2$", "engine_died"),
    ],
)
async def test_an_engine_that_cannot_start_reports_why(
    make_client: MakeLink, arguments: list[str], words: str, code: str
) -> None:
    """The reason is in its own words, or its exit status if there were none."""
    client = make_client(*arguments)
    with pytest.raises(EngineFailed, match=words) as caught:
        await client.start()
    assert caught.value.code == code


async def test_a_missing_command_is_reported(make_client: MakeLink) -> None:
    """Closing a client that never started is allowed."""
    client = make_client(command=["/nowhere/engine"])
    with pytest.raises(EngineFailed, match=r"cannot be started: .*/nowhere/engine"):
        await client.start()
    await client.close()


async def test_a_model_that_takes_too_long_to_load_is_ended(make_client: MakeLink) -> None:
    """Its process does not remain."""
    client = make_client("--load-seconds", NEVER, start_seconds=0.3, stall_seconds=0.1)
    with pytest.raises(EngineFailed, match=r"not loaded within 0\.3 s") as caught:
        await client.start()
    assert caught.value.code == "engine_start_timeout"
    assert not is_alive(client._process.pid)


async def test_the_engine_starts_before_its_weights_arrive(make_client: MakeLink) -> None:
    """It receives their path later, and the time until then does not count as loading time."""
    folders: asyncio.Future[Mapping[str, str]] = asyncio.get_running_loop().create_future()
    client = make_client("--weights", "s3://b/m", start_seconds=NEVER, folders=folders)
    starting = asyncio.create_task(client.start())
    await until(lambda: hasattr(client, "_ready"))
    assert is_alive(client._process.pid)
    client._start_seconds = PATIENCE_SECONDS  # from here on, time counts
    folders.set_result({"s3://b/m": "/here/m"})
    assert (await starting).model == "/here/m"


async def test_an_engine_that_cannot_start_does_not_wait_for_weights(make_client: MakeLink) -> None:
    """An error that would end it after an hour of downloading ends it now."""
    never: asyncio.Future[Mapping[str, str]] = asyncio.get_running_loop().create_future()
    with pytest.raises(EngineFailed, match="no GPU"):
        await make_client("--refuse", "no GPU", folders=never).start()


async def test_failed_weights_leave_no_engine(make_client: MakeLink) -> None:
    """The caller gets the reason."""
    folders: asyncio.Future[Mapping[str, str]] = asyncio.get_running_loop().create_future()
    folders.set_exception(OSError("no bucket"))
    client = make_client("--weights", "s3://b/m", folders=folders)
    with pytest.raises(OSError, match="no bucket"):
        await client.start()
    assert not group_is_alive(client._process.pid)


async def test_loading_is_not_a_stall(make_client: MakeLink) -> None:
    """It may use its whole time limit, however short the limit for a stall is."""
    client = make_client("--load-seconds", 1, stall_seconds=0.1)
    await client.start()


async def test_canceling_the_start_leaves_no_process(make_client: MakeLink) -> None:
    """A worker may have to stop while its model loads."""
    client = make_client("--load-seconds", NEVER)
    starting = asyncio.create_task(client.start())
    await until(lambda: hasattr(client, "_process"))
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not is_alive(client._process.pid)


@pytest.mark.parametrize("how", ["hang", "freeze"])
async def test_an_engine_that_makes_no_step_is_killed(make_client: MakeLink, how: str) -> None:
    """It holds whether it still sends statistics or not, and with a full pipe."""
    client = make_client(*FAST_STATS, stall_seconds=0.5)
    await client.start()
    tasks = [send(client, **{how: True})]
    tasks += [send(client, wait=NEVER, text="x" * 100_000) for _ in range(20)]
    for task in tasks:
        with pytest.raises(EngineDied) as caught:
            await task
        assert caught.value.reason.startswith("stalled: ")
        assert caught.value.reason.endswith(" s, with 21 requests in the engine")
    assert not is_alive(client._process.pid)


async def test_an_engine_that_cannot_be_killed_is_abandoned(
    make_client: MakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver may hold a hanging process so that even SIGKILL is delayed.

    Requests that do not fit into its pipe do not wait either.
    """
    monkeypatch.setattr(link_module, "_EXIT_SECONDS", 0.1)
    client = make_client(*FAST_STATS, stall_seconds=0.2)
    await client.start()
    with monkeypatch.context() as patched:
        patched.setattr(link_module.os, "killpg", lambda *_: None)
        tasks = [send(client, freeze=True)]
        tasks += [send(client, wait=NEVER, text="x" * 100_000) for _ in range(20)]
        for task in tasks:
            with pytest.raises(EngineDied, match=r"stalled: .*; its process \d+ cannot be killed"):
                await asyncio.wait_for(task, 60)
        with pytest.raises(EngineDied, match="cannot be killed"):
            await ask(client)


async def test_an_engine_with_a_slow_loop_is_not_stalled(make_client: MakeLink) -> None:
    """Its process is alive, so its time limit is longer than without any sign of life."""
    client = make_client(*FAST_STATS, stall_seconds=4)
    await client.start()
    assert (await ask(client, block=6)).is_success


async def test_a_loop_that_blocks_forever_is_detected(make_client: MakeLink) -> None:
    """It is detected a little later."""
    client = make_client(*FAST_STATS, stall_seconds=0.2)
    await client.start()
    with pytest.raises(EngineDied, match=r"stalled: .* s, with 1 request in the engine"):
        await ask(client, block=NEVER)
    assert not is_alive(client._process.pid)


async def test_a_layer_within_a_long_step_is_a_sign_of_work() -> None:
    """A step may take longer than a stall on a CPU; one that hangs is still detected."""
    client = EngineClient(["unused"], stall_seconds=1, start_seconds=1)
    seen = []
    for layers in (0, 1, 1, 2):
        client._handle_frame(Stats(EngineStats(running=1, steps=7, layers=layers)))
        seen.append(client._progress)
    assert seen == [1, 2, 2, 3]


async def test_an_engine_that_works_is_not_stalled(make_client: MakeLink) -> None:
    """An idle engine is not stalled either, nor one whose lines all fail before any step."""
    idle, busy, failing = (make_client(*FAST_STATS, stall_seconds=3) for _ in range(3))
    await asyncio.gather(*(client.start() for client in (idle, busy, failing)))
    ends = time.monotonic() + 4

    async def wait_idle() -> None:
        await asyncio.sleep(4)
        assert (await ask(idle)).is_success

    async def work() -> None:
        assert (await ask(busy, wait=4)).is_success

    async def send_malformed() -> None:
        while time.monotonic() < ends:
            assert not (await failing.fetch_row(1, 0, b"no json")).is_success
            await asyncio.sleep(0.1)

    await asyncio.gather(wait_idle(), work(), *(send_malformed() for _ in range(4)))


async def test_the_time_that_the_worker_itself_was_stopped_does_not_count(
    make_client: MakeLink,
) -> None:
    """A machine that was paused is not a reason to kill the engine that was paused with it."""
    client = make_client(*FAST_STATS, stall_seconds=3)
    await client.start()
    task = send(client, wait=0.5)
    await until(lambda: client.stats.running == 1)
    os.kill(client._process.pid, signal.SIGSTOP)
    time.sleep(5)  # noqa: ASYNC251 - the event loop blocks, as when the process is stopped
    asyncio.get_running_loop().call_later(0.2, os.kill, client._process.pid, signal.SIGCONT)
    assert (await task).is_success


async def test_closing_lets_the_engine_exit_by_itself(make_client: MakeLink) -> None:
    """Waiting requests fail; closing again, or after a crash, does nothing."""
    client = make_client()
    await client.start()
    waiting = send(client, wait=NEVER)
    await until(lambda: client.inflight == 1)
    await client.close()
    assert client._process.returncode == 0
    with pytest.raises(EngineDied, match=r"^closed$"):
        await waiting
    await client.close()
    with pytest.raises(EngineDied, match=r"^closed$"):
        await ask(client)


async def test_an_engine_that_does_not_exit_is_killed(
    make_client: MakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets a few seconds to exit."""
    monkeypatch.setattr(link_module, "_CLOSE_SECONDS", 0.2)
    client = make_client()
    await client.start()
    os.kill(client._process.pid, signal.SIGSTOP)
    await client.close()
    assert client._process.returncode == -signal.SIGKILL


async def test_the_engine_inherits_no_pipe_of_another(make_client: MakeLink) -> None:
    """With two clients, each engine ends when its own pipe closes."""
    first, second = make_client(), make_client()
    await asyncio.gather(first.start(), second.start())
    await first.close()
    assert first._process.returncode == 0
    assert (await ask(second)).is_success


PARENT = """
import asyncio, sys
from tidemill.engine_process.client import EngineClient

async def main():
    link = EngineClient(sys.argv[1:], stall_seconds=600, start_seconds=600)
    starting = asyncio.create_task(link.start())
    while not hasattr(link, "_process"):
        await asyncio.sleep(0.01)
    if "600" not in sys.argv:
        await starting
    print(link._process.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
# On Linux the kernel kills it in any case; elsewhere it must notice that its pipe closed.
STATES = ["loading", "idle", *(["frozen"] if sys.platform == "linux" else [])]


@pytest.mark.parametrize("state", STATES)
async def test_an_engine_dies_with_its_worker(state: str) -> None:
    """A killed worker leaves no engine that holds the GPU."""
    engine = [sys.executable, str(SCRIPT), *(["--load-seconds", "600"] * (state == "loading"))]
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, *engine, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert worker.stdout is not None
    pid = int(await worker.stdout.readline())
    assert is_alive(pid)
    if state == "frozen":
        os.kill(pid, signal.SIGSTOP)
    worker.kill()
    await worker.wait()
    await until(lambda: not is_alive(pid))


async def test_a_frame_that_cannot_be_handled_ends_the_engine(
    make_client: MakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the exception is, no request waits forever for its row."""
    client = make_client()
    await client.start()

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(client, "_handle_frame", fail)
    with pytest.raises(EngineDied, match="its frames cannot be read: MemoryError"):
        await ask(client)


async def test_a_watchdog_that_fails_ends_the_engine(
    make_client: MakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the watchdog, a hanging engine would never be ended."""

    async def fail(_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(EngineClient, "_kill_stalled", fail)
    client = make_client()
    await client.start()
    with pytest.raises(EngineDied, match="the watchdog failed: MemoryError"):
        await ask(client, wait=NEVER)
