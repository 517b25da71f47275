"""From a sampled token to its bytes at the socket: one server, in this process, with many streams.

    python -m bench.server.wire out/bench/46m [--streams 64] [--requests 128]

The clock of a token begins when the engine's thread reports the step that sampled it, and ends
when the event has been written to its socket. Prints shares of these times, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextvars import ContextVar
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidemill.engine.config import EngineConfig
from tidemill.engine.load import load_served
from tidemill.engine.loop.engine import Engine
from tidemill.offline.console.signals import StopSignals
from tidemill.server.app import make_app, make_context
from tidemill.server.settings import ServerSettings
from tidemill.server.uvicorn_server import make_server, raise_file_limit

NAME = "bench"
_emitted_at: ContextVar[float] = ContextVar("told_at")


class Clock:
    """Stamps each event when a step emits it, and measures until it is written."""

    def __init__(self) -> None:
        self.seconds = array("d")
        self._stamps: dict[int, float] = {}
        self._send, self._stream = Engine._send, Engine.stream  # noqa: SLF001

    def install(self) -> None:
        """Intercept events between the engine's thread and their readers."""
        clock = self

        def send(engine: Engine[Any, Any], mail: Iterable[Any]) -> None:
            now, letters = time.monotonic(), [*mail]
            for _, news in letters:
                clock._stamps[id(news)] = now
            clock._send(engine, letters)

        async def stream(
            engine: Engine[Any, Any], requests: Sequence[Any]
        ) -> AsyncGenerator[Any, None]:
            async for news in clock._stream(engine, requests):
                _emitted_at.set(clock._stamps.pop(id(news), 0.0))
                yield news

        Engine._send = send  # type: ignore[method-assign,assignment] # noqa: SLF001
        Engine.stream = stream  # type: ignore[method-assign,assignment]

    def timed(self, app: ASGIApp) -> ASGIApp:
        """Return an application that measures every event when it has been written."""

        async def timed_app(scope: Scope, receive: Receive, send: Send) -> None:
            async def timed_send(message: Message) -> None:
                await send(message)
                if message.get("more_body") and (emitted_at := _emitted_at.get(0.0)):
                    self.seconds.append(time.monotonic() - emitted_at)

            await app(scope, receive, timed_send)

        return timed_app


def main() -> None:
    """Serve, let another process send requests, and print the clock's measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=128)
    given = parser.parse_args()
    clock = Clock()
    clock.install()
    engine = load_served(EngineConfig(given.model, max_model_len=2048), served_names=(NAME,))
    settings = ServerSettings(port=0, drain_seconds=5)
    context = make_context(engine, (NAME,), settings)
    outputs: list[str] = []

    def ask(url: str) -> None:
        command = [sys.executable, "-m", "bench.server.streams", url, "--model", NAME]
        command += ["--streams", str(given.streams), "--requests", str(given.requests)]
        outputs.append(
            subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        )
        os.kill(os.getpid(), signal.SIGTERM)

    raise_file_limit()
    with StopSignals() as signals:
        make_server(
            clock.timed(make_app(context)),
            context.admission,
            settings,
            on_signal=signals.on_signal,
            on_listening=lambda url: threading.Thread(target=ask, args=(url,), daemon=True).start(),
        ).run()
    engine.close()
    seconds = sorted(clock.seconds)
    shares = {f"p{share}_ms": _at(seconds, share) for share in (50, 90, 99)}
    print(json.dumps({"events": len(seconds), **shares, **json.loads(outputs[0])}))


def _at(seconds: Sequence[float], share: int) -> float:
    return round(1e3 * seconds[min(len(seconds) - 1, len(seconds) * share // 100)], 2)


if __name__ == "__main__":
    main()
