"""MiniStack that also answers frames over a Unix socket: parsing HTTP takes most of a call's time.

    python -P tests/framed_ministack.py SOCKET

Runs in MiniStack's own environment, with quicker copies of items and kept results of pure
functions: both took a third of its time. A frame is its length in four bytes and a marshalled
tuple; `tests/framed_calls.py` is the other end. HTTP at the usual port works, too.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import importlib
import marshal
import sys
import traceback
from functools import lru_cache
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

_LENGTH_BYTES = 4


class Frames(asyncio.Protocol):
    """Answers the requests of a connection, one after the other."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._received = bytearray()
        self._is_closed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: Any) -> None:
        """Store where to send the answers."""
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        """Let waiting requests notice that their client has gone."""
        self._is_closed.set()

    def data_received(self, data: bytes) -> None:
        """Start to answer the request when all of it is there."""
        self._received += data
        size = _LENGTH_BYTES + int.from_bytes(self._received[:_LENGTH_BYTES], "big")
        if len(self._received) >= max(size, _LENGTH_BYTES + 1):
            request = marshal.loads(self._received[_LENGTH_BYTES:])  # noqa: S302 - of our own tests
            self._received.clear()
            task = asyncio.create_task(self._answer(*request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(
        self, method: str, target: str, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> None:
        path, _, query = target.partition("?")
        scope = {
            "type": "http",
            "http_version": "1.1",
            "asgi": {"spec_version": "2.3", "version": "3.0"},
            "method": method,
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode("ascii"),
            "query_string": query.encode("ascii"),
            "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 0),
            "server": ("127.0.0.1", 0),
            "extensions": {},
        }
        bodies = [body]
        answer: list[Any] = []
        parts: list[bytes] = []

        async def receive() -> dict[str, object]:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await self._is_closed.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                answer[:] = message["status"], [(bytes(k), bytes(v)) for k, v in message["headers"]]
            elif message["type"] == "http.response.body" and method != "HEAD":
                parts.append(bytes(message.get("body", b"")))

        try:
            await self._app(scope, receive, send)
        except Exception:  # noqa: BLE001 - as hypercorn does
            traceback.print_exc()
            if answer:  # the client must not take the part for the whole
                self._transport.close()
                return
            answer[:] = 500, []
        frame = marshal.dumps((*answer, b"".join(parts)))
        self._transport.write(len(frame).to_bytes(_LENGTH_BYTES, "big") + frame)


def quick_copy(value: Any) -> Any:
    """Return a deep copy; plain values, such as items, are copied eight times as fast."""
    try:
        return marshal.loads(marshal.dumps(value))  # noqa: S302 - of this process
    except ValueError:  # a class of MiniStack's own
        return copy.deepcopy(value)


def quicken(dynamodb: Any) -> None:
    """Replace functions of MiniStack's DynamoDB with quicker ones that return the same."""
    dynamodb.copy = SimpleNamespace(deepcopy=quick_copy)
    for name in ("_ddb_canonicalize_number", "_number_error", "_number_size_bytes"):
        setattr(dynamodb, name, lru_cache(4096)(getattr(dynamodb, name)))
    tokens_of = lru_cache(1024)(dynamodb._tokenize)
    dynamodb._tokenize = lambda expression: [*tokens_of(expression)]
    dynamodb._condition_syntax_error = lru_cache(1024)(dynamodb._condition_syntax_error)


def main() -> None:
    """Run MiniStack until it is stopped."""
    [address] = sys.argv[1:]
    del sys.argv[1:]
    app = importlib.import_module("ministack.app")
    quicken(importlib.import_module("ministack.services.dynamodb"))
    # What was imported is not searched for garbage.
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    hypercorn = importlib.import_module("hypercorn.asyncio")
    serve_http = hypercorn.serve

    async def serve(app: Any, config: Any) -> None:
        loop = asyncio.get_running_loop()
        async with await loop.create_unix_server(lambda: Frames(app), address):
            await serve_http(app, config)

    hypercorn.serve = serve
    app.main()


if __name__ == "__main__":
    main()
