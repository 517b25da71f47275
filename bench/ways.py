"""Counts the files that run on each main code path, by running it under a profiler.

    python -m bench.ways [step] [chat] [drop] [row] [csv] [--files]

A file counts when one of its functions is called while the path is recorded, on any thread; the
bodies of modules do not count, functions that numba compiled do. Needs MiniStack for `drop`.

- step: one steady greedy decode step of the demo model on the CPU, without drafts (as on a GPU) and
  without the engine's thread; drafts add four files.
- chat: the second plain chat of a server in this process, from ASGI request to response.
- drop: one run of the control Lambda for a new file, with its calls to AWS.
- row: from the engine's reply to the flushed output of `tidemill run`, without clocks that tick.
- csv: a row of a table through `tidemill run`, from the CSV file to the CSV file, without the
  engine. A file counts if one of its functions is called as often as the table has rows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import httpx
from pydantic_core import to_json

import tidemill
from tests.emulators import running
from tests.handler.intake.rig import Cloud, lines_of, plenty
from tidemill import demo
from tidemill.cli.main import make_parser
from tidemill.engine.config import EngineConfig
from tidemill.engine.load import load_served
from tidemill.engine.loop.assembly import make_core
from tidemill.engine.model.loading import load_model
from tidemill.engine.model.network.kv_cache_size import compute_kv_cache_size
from tidemill.engine.scheduling.sequence import Sampling, SequenceRequest
from tidemill.handler.intake.control_messages import Drop, drop_message
from tidemill.handler.lambdas.control import handle_message
from tidemill.offline.run.job import run_job
from tidemill.offline.run.run_flags import options_from
from tidemill.protocol.contract import EngineInfo, EngineStats, Reply, Usage
from tidemill.server.app import make_app, make_context
from tidemill.server.settings import ServerSettings

_PACKAGE = f"{Path(tidemill.__file__).parent}/"
_KERNELS = "engine/kernels/"
# The first steps are prefill, and a pipelined loop is one step behind.
_WARM_STEPS = 8
_NUM_LINES = 3
_NUM_TABLE_ROWS = 200
_TIMEOUT_SECONDS = 60.0
# They run at intervals, whatever the rows do.
_CLOCKS = frozenset({"protocol/stall.py", "server/loop_lag.py"})


@dataclass(frozen=True, slots=True)
class Way:
    """The files of one path, each below `tidemill/`; `count` is of a separate `kind`."""

    name: str
    files: frozenset[str]
    kind: str = ""
    count: int = 0

    @property
    def remark(self) -> str:
        """Return the last column of the table."""
        return f"{self.kind} {self.count}" if self.kind else ""


@dataclass
class Recorder:
    """Records the files of `tidemill` whose functions are called inside `recording` blocks."""

    files: set[str] = field(default_factory=set)
    main_thread_files: set[str] = field(default_factory=set)
    num_calls: Counter[CodeType] = field(default_factory=Counter)
    is_on: bool = False

    def profile(self, frame: FrameType, event: str, _argument: object) -> None:
        """Handle one event of the interpreter's profiler."""
        code = frame.f_code
        if (
            self.is_on
            and event == "call"
            and code.co_name != "<module>"
            and code.co_filename.startswith(_PACKAGE)
        ):
            name = code.co_filename.removeprefix(_PACKAGE)
            self.files.add(name)
            self.num_calls[code] += 1
            if threading.current_thread() is threading.main_thread():
                self.main_thread_files.add(name)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Profile this thread and every thread that starts inside the block."""
        threading.setprofile(self.profile)
        sys.setprofile(self.profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the files that run inside the block."""
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False

    def way(self, name: str, kind: str = "", count: int = 0) -> Way:
        """Return what has been recorded."""
        return Way(name, frozenset(self.files), kind, count)


def record_step() -> Way:
    """Record one decode step of one greedy sequence, without drafts."""
    config = EngineConfig(str(demo.MODEL_PATH), device="cpu", speculative_decoding=False)
    model = load_model(config)
    work = make_core(model, compute_kv_cache_size(model, config), config)
    sampling = Sampling(temperature=0)
    work.add(SequenceRequest(list(range(10, 30)), 4 * _WARM_STEPS, sampling))
    for _ in range(_WARM_STEPS):
        work.step()
    recorder = Recorder()
    with recorder.installed(), recorder.recording():
        work.step()
    num_host = sum(not name.startswith(_KERNELS) for name in recorder.files)
    return recorder.way("a token: one steady greedy step", "host", num_host)


def record_chat() -> Way:
    """Record the second chat of a server; the first one has filled every cache."""
    recorder = Recorder()
    with recorder.installed():
        config = EngineConfig(str(demo.MODEL_PATH), device="cpu")
        engine = load_served(config, served_names=(demo.NAME,))
        try:
            context = make_context(engine, (demo.NAME,), ServerSettings())
            asyncio.run(_chat_twice(make_app(context), recorder))
        finally:
            engine.close()
    num_event_loop = len(recorder.main_thread_files)
    return recorder.way("a plain chat through the server", "on the event loop", num_event_loop)


async def _chat_twice(app: Any, recorder: Recorder) -> None:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://bench", timeout=_TIMEOUT_SECONDS
    ) as client:
        await _chat(client, "What is the capital of France?")
        with recorder.recording():
            await _chat(client, "What is the capital of Italy?")


async def _chat(client: httpx.AsyncClient, question: str) -> None:
    body = {
        "model": demo.NAME,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 16,
    }
    response = await client.post("/v1/chat/completions", json=body)
    response.raise_for_status()


def record_drop() -> Way:
    """Record the control Lambda's run for the second of two dropped files."""
    recorder = Recorder()
    with (
        tempfile.TemporaryDirectory() as folder,
        running("ministack", Path(folder)) as emulator,
        recorder.installed(),
    ):
        cloud = Cloud.on(emulator)
        first, second = (cloud.put(lines_of(4), f"input/{name}.jsonl") for name in "ab")
        run_control(cloud, first)
        with count_calls(cloud) as calls, recorder.recording():
            run_control(cloud, second)
    return recorder.way("a dropped file: one control run", "AWS calls", calls.total())


def run_control(cloud: Cloud, drop: Drop) -> None:
    """Run the control Lambda with the event of a dropped file."""
    handle_message(cloud.aws, cloud.deployment, to_json(drop_message(drop)).decode(), plenty)


@contextmanager
def count_calls(cloud: Cloud) -> Iterator[Counter[str]]:
    """Count the calls of a deployment's driver by operation."""
    calls: Counter[str] = Counter()

    def count(model: Any, **_: object) -> None:
        calls[model.name] += 1

    events = [client.meta.events for client in cloud.aws.clients.values()]
    for each in events:
        each.register("before-call", count, unique_id="ways")
    yield calls
    for each in events:
        each.unregister("before-call", unique_id="ways")


class BenchEngine:
    """An engine without weights."""

    def info(self) -> EngineInfo:
        """Return a model without weights."""
        return EngineInfo(demo.NAME, None, "bench", "cpu", 0, _NUM_LINES)

    def stats(self) -> EngineStats:
        """Return zeros."""
        return EngineStats(0, 0, 0.0, 0, 0, 0, 0)

    def close(self) -> None:
        """Release nothing."""


class HeldEngine(BenchEngine):
    """Holds every reply until all lines wait, then records the way of the first line's row."""

    def __init__(self, recorder: Recorder, output: Path) -> None:
        self._recorder, self._output = recorder, output
        self._num_waiting = 0
        self._all_wait, self._is_written = asyncio.Event(), asyncio.Event()

    async def respond(
        self, url: str, body: Mapping[str, Any], request_id: str, created: int
    ) -> Reply:
        """Reply to the first line; to the others once its row is in the output."""
        del url
        self._num_waiting += 1
        if self._num_waiting == _NUM_LINES:
            self._all_wait.set()
        if body["messages"][0]["content"] == "0":
            await self._all_wait.wait()
            watch = asyncio.create_task(self._watch())
            watch.add_done_callback(lambda _: self._is_written.set())
            self._recorder.is_on = True
        else:
            await self._is_written.wait()
        return Reply(200, {"id": request_id, "created": created}, Usage(1, 0, 1))

    async def _watch(self) -> None:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            while not self._output.stat().st_size:  # noqa: ASYNC110 - a file has no event
                await asyncio.sleep(0.001)
        self._recorder.is_on = False


def record_row() -> Way:
    """Record one row of `tidemill run` while the other lines wait in the engine."""
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder, recorder.installed():
        source, output = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        source.write_text("".join(f"{_line(number)}\n" for number in range(_NUM_LINES)))
        words = ["run", "-i", str(source), "-o", str(output)]
        options = options_from(make_parser().parse_args(words))
        run_job(options, load=lambda *_, **__: HeldEngine(recorder, output))
    recorder.files -= _CLOCKS
    return recorder.way("a row: engine to output")


class PromptReply(BenchEngine):
    """Replies to each chat at once with a completion that echoes its prompt."""

    async def respond(
        self, url: str, body: Mapping[str, Any], request_id: str, created: int
    ) -> Reply:
        """Return the completion."""
        del url
        message = {"role": "assistant", "content": body["messages"][0]["content"]}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        answer = {"id": request_id, "created": created, "model": demo.NAME, "choices": [choice]}
        return Reply(200, answer, Usage(1, 0, 1))


def record_csv() -> Way:
    """Record a run of a CSV file, and keep the files that run once for each of its rows."""
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder, recorder.installed(), recorder.recording():
        source, output = Path(folder) / "in.csv", Path(folder) / "out.csv"
        rows = "".join(f"{number},a word {number}\n" for number in range(_NUM_TABLE_ROWS))
        source.write_text(f"number,text\n{rows}")
        words = ["run", "-i", str(source), "-o", str(output), "--prompt", "Say {{text}}"]
        words += ["--model", str(demo.MODEL_PATH)]
        options = options_from(make_parser().parse_args(words))
        run_job(options, load=lambda *_, **__: PromptReply())
        assert output.read_text().count("a word") == 2 * _NUM_TABLE_ROWS
    counted = [code for code, count in recorder.num_calls.items() if count >= _NUM_TABLE_ROWS]
    recorder.files = {code.co_filename.removeprefix(_PACKAGE) for code in counted}
    return recorder.way("a row of a CSV file, without the engine")


def _line(number: int) -> str:
    body = {"model": demo.NAME, "messages": [{"role": "user", "content": str(number)}]}
    url = "/v1/chat/completions"
    return json.dumps({"custom_id": str(number), "method": "POST", "url": url, "body": body})


WAYS: Mapping[str, Callable[[], Way]] = {
    "step": record_step,
    "chat": record_chat,
    "drop": record_drop,
    "row": record_row,
    "csv": record_csv,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "ways", nargs="*", metavar="WAY", help=f"show these of {', '.join(WAYS)} (default: all)"
    )
    parser.add_argument("--files", action="store_true", help="also list the files of each way")
    parsed = parser.parse_args(arguments)
    ways = [WAYS[name]() for name in parsed.ways or WAYS]
    print("| way | files | of these |\n|---|---:|---|")
    for way in ways:
        print(f"| {way.name} | {len(way.files)} | {way.remark} |")
    for way in ways if parsed.files else ():
        print(f"\n{way.name}", *sorted(way.files), sep="\n  ")


if __name__ == "__main__":
    main()
