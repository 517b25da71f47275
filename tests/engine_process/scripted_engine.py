"""An engine process without a model, scripted by the bodies of its requests.

    python tests/engine_process/scripted_engine.py --reader-fd N --writer-fd M

| key of the body | what happens |
|---|---|
| `wait` | this many seconds pass first |
| `gate` | the request waits until there is a file of this name |
| `status` | the reply is an error with this status |
| `raise` | the request raises a ValueError with this message |
| `vector` | the reply is a vector of this many numbers, and nothing was generated |
| `hear` | this many seconds of audio were processed |
| `fail` | the engine fails with this message; `machine`: the machine is to blame |
| `die` | the process kills itself, as a failure in a kernel or the system would |
| `die_once` | the same, unless a file of this name exists; it is then created |
| `stream` | an interactive request gets this many chunks, then follows the rest of the body |
| `hang` | requests and steps stop, but the process still reads and writes frames |
| `block` | the event loop blocks for this many seconds, as during long work |
| `freeze` | the process stops, as under SIGSTOP |

With `--labels`, chats are answered with a label of their last message.

Any other body is answered with `{"id", "created", "echo": body}` and a usage of 10 prompt tokens, 4
of them cached, and 3 of completion.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tidemill.engine.errors import MachineFailed
from tidemill.engine_process.child import serve
from tidemill.protocol.contract import (
    EngineError,
    EngineInfo,
    EngineStats,
    Reply,
    StreamedReply,
    Usage,
)

MAX_NUM_SEQS = 64
USAGE = Usage(prompt_tokens=10, cached_tokens=4, completion_tokens=3)


async def pass_gate(body: Mapping[str, Any]) -> None:
    """Wait until a file with the name in a body's `gate` exists."""
    while not Path(body.get("gate", "/")).exists():  # noqa: ASYNC110, ASYNC240 - a local file
        await asyncio.sleep(0.05)


@dataclass
class Journal:
    """Appends events to a file that any number of processes may share."""

    fd: int

    def note(self, name: str, event: str) -> None:
        """Append one line in one write, so that lines of many writers never mix."""
        os.write(self.fd, f"{name}\t{event}\t{time.time():.6f}\n".encode())


@dataclass
class ScriptedEngine:
    """Follows the scripts, `slots` requests at a time for `service_seconds` each, like a GPU.

    `slots` None sets no limit.
    """

    service_seconds: float = 0
    slots: int | None = None
    journal: Journal | None = None
    model: str = "scripted"
    steps: int = 0
    running: int = 0
    is_hung: bool = False
    is_blocked: bool = False
    endpoints: tuple[str, ...] = ()
    ill_after: Path | None = None
    labels: bool = False
    free: asyncio.Semaphore | None = field(init=False)

    def __post_init__(self) -> None:
        """Create the slots."""
        self.free = None if self.slots is None else asyncio.Semaphore(self.slots)

    async def respond(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        """Follow the body, and record its start and end."""
        del url
        name = body.get("custom_id", request_id)
        async with AsyncExitStack() as stack:
            if self.free is not None:
                await stack.enter_async_context(self.free)
            self._note(name, "started")
            self.running += 1
            stack.callback(self._leave)
            if seconds := self.service_seconds + body.get("wait", 0):
                await asyncio.sleep(seconds)
            await pass_gate(body)
            reply = self._act(_labelled(body) if self.labels else body, request_id, created)
            if self.is_hung:
                await asyncio.Event().wait()
            self.steps += 1
            self._note(name, "finished")
        return reply

    async def answer(
        self, url: str, body: dict[str, Any], request_id: str, created: int
    ) -> Reply | StreamedReply:
        """Follow the body, in chunks if it specifies them."""
        if "stream" in body:
            return StreamedReply(self._chunks(url, body, request_id, created))
        return await self.respond(url, body, request_id, created)

    async def _chunks(
        self, url: str, body: dict[str, Any], request_id: str, created: int
    ) -> AsyncGenerator[dict[str, Any], None]:
        for number in range(body["stream"]):
            yield {"number": number}
        yield (await self.respond(url, body, request_id, created)).body

    def info(self) -> EngineInfo:
        """Return the description of a model without weights."""
        slots, endpoints = self.slots or MAX_NUM_SEQS, self.endpoints
        return EngineInfo(self.model, "r1", "test", "cpu", 0, slots, endpoints=endpoints)

    def stats(self) -> EngineStats:
        """Count one more step whenever a request runs, as a model that generates would."""
        if self.running and not self.is_hung and not self.is_blocked:
            self.steps += 1
        return EngineStats(running=self.running, steps=self.steps)

    def close(self) -> None:
        """Do nothing; nothing is held."""

    def _act(self, body: dict[str, Any], request_id: str, created: int) -> Reply:
        is_ill = self.ill_after is not None and self.ill_after.exists()
        if "die" in body or is_ill:
            os.kill(os.getpid(), signal.SIGKILL)
        if "die_once" in body and not Path(body["die_once"]).exists():
            Path(body["die_once"]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if "freeze" in body:
            os.kill(os.getpid(), signal.SIGSTOP)
        if "block" in body:
            self.is_blocked = True
            time.sleep(body["block"])
            self.is_blocked = False
        if "hang" in body:
            self.is_hung = True
        if "fail" in body:
            raise (MachineFailed if "machine" in body else EngineError)(body["fail"])
        if "raise" in body:
            raise ValueError(body["raise"])
        if (status := _status_of(body)) != 200:
            error = {
                "message": "The body requested this error.",
                "type": "t",
                "param": None,
                "code": "c",
            }
            return Reply(status, {"error": error})
        reply: dict[str, Any] = {"id": request_id, "created": created}
        if (width := body.get("vector")) is not None:
            vector = [round((at + 1) / 7_919, 8) for at in range(width)]
            data = [{"object": "embedding", "index": 0, "embedding": vector}]
            return Reply(200, {**reply, "data": data}, Usage(prompt_tokens=10))
        usage = USAGE._replace(audio_seconds=body.get("hear", 0.0))
        return Reply(200, reply | _content_of(body), usage)

    def _leave(self) -> None:
        self.running -= 1

    def _note(self, name: str, event: str) -> None:
        if self.journal is not None:
            self.journal.note(name, event)


def _labelled(body: dict[str, Any]) -> dict[str, Any]:
    """Return a script by the last message: a label, or an error if it mentions a temperature."""
    text = body["messages"][-1]["content"]
    if "temperature" in text and "temperature" not in body:
        return {"status": 500}
    label = "positive" if "good" in text.lower() else f"negative, because of {text.split()[-1]}"
    choice = {"index": 0, "message": {"role": "assistant", "content": label}}
    return {"choices": [choice | {"finish_reason": "stop"}]}


def _status_of(body: dict[str, Any]) -> int:
    """Return the body's status: an error for a model that is not among the sure ones."""
    is_unsure = "sure" in body and body["model"] not in body["sure"]
    return 500 if is_unsure else int(body.get("status", 200))


def _content_of(body: dict[str, Any]) -> dict[str, Any]:
    """Return choices, a decision (`sure` has the probability of yes by model), or an echo."""
    if "choices" in body:
        return {"choices": body["choices"]}
    if "sure" not in body:
        return {"echo": body}
    answer = {"type": "predicate", "probability": body["sure"][body["model"]]}
    return {"model": body["model"], "answers": [answer]}


def main() -> None:
    """Serve until the other side exits."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--reader-fd", type=int, required=True)
    parser.add_argument("--writer-fd", type=int, required=True)
    parser.add_argument("--liveness-fd", type=int)
    parser.add_argument(
        "--log",
        type=os.path.expandvars,
        help="note each request's beginning and end here; $NAME is a variable",
    )
    parser.add_argument("--service-seconds", type=float, default=0, help="what each request takes")
    parser.add_argument("--slots", type=int, help="requests served at once")
    parser.add_argument("--load-seconds", type=float, default=0, help="what loading takes")
    parser.add_argument("--stats-seconds", type=float, default=1, help="between statistics")
    parser.add_argument("--weights", metavar="ADDRESS", help="wait for these; where is its model")
    parser.add_argument("--refuse", metavar="WORDS", help="refuse to load, with these words")
    parser.add_argument("--endpoint", action="append", default=[], help="it says that it has it")
    parser.add_argument(
        "--ill-after", type=Path, help="it dies of anything once this file is there"
    )
    parser.add_argument("--labels", action="store_true", help="label the chats")
    parser.add_argument("--say", metavar="WORDS", help="print this to both standard streams")
    options, _ = parser.parse_known_args()

    def load(fetched: Callable[[], Mapping[str, str]]) -> ScriptedEngine:
        if options.refuse is not None:
            raise EngineError(options.refuse)
        model = fetched()[options.weights] if options.weights else "scripted"
        time.sleep(options.load_seconds)
        if options.say is not None:
            sys.stdout.write(options.say)
            sys.stderr.write(options.say)
        journal = None
        if options.log is not None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            journal = Journal(os.open(options.log, flags, 0o644))
        return ScriptedEngine(
            options.service_seconds,
            options.slots,
            journal,
            model,
            endpoints=tuple(options.endpoint),
            ill_after=options.ill_after,
            labels=options.labels,
        )

    serve(
        load,
        reader_fd=options.reader_fd,
        writer_fd=options.writer_fd,
        liveness_fd=options.liveness_fd,
        stats_seconds=options.stats_seconds,
    )


if __name__ == "__main__":
    main()
