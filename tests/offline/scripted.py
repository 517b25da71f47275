"""`tidemill` with a scripted engine: `python tests/offline/scripted.py run …` from the root.

The engine does what the body of a request says: `wait` (seconds), `status`, `raise`, `die`, ….
`hang` never answers, `block` blocks the event loop for N seconds, and `lock` blocks all of
Python forever. `--load-seconds N` makes loading slow, `--close-seconds N` closing;
`--file-bytes N` lets no file grow longer, as on a full disk, and `--flush-seconds N` is how often
rows that wait are flushed. `--end-seconds N` is how long a process may take to end after a stall;
`--guard` starts the guard process of the command.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tidemill.cli.main import exit_status_of, make_parser
from tidemill.engine.config import EngineConfig
from tidemill.offline.console.signals import end_process, install_early_handlers
from tidemill.offline.engine import watched_engine
from tidemill.offline.run import feed
from tidemill.offline.run.job import run_job
from tidemill.offline.run.run_flags import options_from
from tidemill.protocol.contract import EngineError, EngineInfo, EngineStats, Reply, Usage


class ScriptedEngine:
    """Does what each body says; the reply depends on nothing but line and `created`."""

    def __init__(self, close_seconds: float = 0, speed: float = 1) -> None:
        self.close_seconds = close_seconds
        self.speed = speed
        self.num_requests = 0
        self.running = 0
        self.most_running = 0
        self.is_closed = False
        self.fails_at: set[str] = set()
        self.dies_at: str | None = None
        self.hangs_after = sys.maxsize

    async def respond(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        """Follow the script in the body."""
        self.num_requests += 1
        act(body)
        if "hang" in body or self.num_requests > self.hangs_after:
            await asyncio.Event().wait()
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if "wait" in body:
                await asyncio.sleep(body["wait"] / self.speed)
        finally:
            self.running -= 1
        if body.get("name") in self.fails_at:
            raise ValueError("no luck")
        if "name" in body and body["name"] == self.dies_at:
            raise EngineError("no engine")
        if "raise" in body:
            # With what no row can hold, as a message that quotes its input may.
            raise ValueError(f"{body['raise']} \ud800")
        if "die" in body:
            raise EngineError(body["die"])
        if "surrogate" in body:
            return Reply(200, {"x": "\ud800"})
        if "reply" in body:
            return Reply(200, body["reply"])
        if (status := body.get("status", 200)) != 200:
            error = {"message": f"No {url}.", "type": "t", "param": None, "code": "c"}
            return Reply(status, {"error": error}, bare_message=body.get("bare", False))
        reply = {"id": request_id, "created": created, "text": body.get("say", "hello")}
        return Reply(200, reply, Usage(10, 4, 3))

    def info(self) -> EngineInfo:
        """A model without weights."""
        return EngineInfo("scripted", None, "test", "cpu", 0, 4, model_digest="d1")

    def stats(self) -> EngineStats:
        """A constant of each kind."""
        return EngineStats(3, 2, 0.5, 100, 40, 30, 1, step_seconds=3.0, launch_seconds=3.0)

    def close(self) -> None:
        """Take the configured time."""
        time.sleep(self.close_seconds)
        self.is_closed = True


def act(body: dict[str, Any]) -> None:
    """Print, or keep the event loop or all of Python from running, as a body says."""
    if "print" in body:
        sys.stdout.write(f"{body['print']}\n")
    if "block" in body:
        time.sleep(body["block"])
    if "lock" in body:
        # A mutex that is locked twice waits forever, and does not release Python's lock.
        lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
        lock(mutex)
        lock(mutex)


def main() -> int:
    """Run the command line with the scripted engine."""
    own = argparse.ArgumentParser()
    own.add_argument("--load-seconds", type=float, default=0)
    own.add_argument("--close-seconds", type=float, default=0)
    own.add_argument("--file-bytes", type=int)
    own.add_argument("--flush-seconds", type=float, default=feed.FLUSH_SECONDS)
    own.add_argument("--end-seconds", type=float, default=watched_engine.END_SECONDS)
    own.add_argument("--guard", action="store_true")
    script, arguments = own.parse_known_args()
    watched_engine.END_SECONDS = script.end_seconds
    feed.FLUSH_SECONDS = script.flush_seconds
    if script.file_bytes is not None:
        sys.dont_write_bytecode = True  # it would be cut off, too
        resource.setrlimit(resource.RLIMIT_FSIZE, (script.file_bytes, script.file_bytes))

    def load(config: EngineConfig, **_: object) -> ScriptedEngine:
        del config
        time.sleep(script.load_seconds)
        return ScriptedEngine(script.close_seconds)

    # A shell that starts pytest in the background makes its children ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    install_early_handlers()
    parsed = make_parser(arguments[0]).parse_args(arguments)
    options = options_from(parsed)
    return exit_status_of(
        lambda: run_job(options, load=load, retry_delays=(0.01,) * 4, has_guard=script.guard)
    )


if __name__ == "__main__":
    end_process(main())
