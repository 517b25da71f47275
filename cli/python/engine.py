"""Engine for Python programs: a process of its own, asked from any thread, task or notebook."""

from __future__ import annotations

import asyncio
import sys
import threading
import weakref
from base64 import b64decode
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Self

from tidemill.protocol.contract import EngineInfo, EngineStats

from ..console.errors import CliError
from ..engine.engine import require_engine
from ..engine.options import EngineOptions, engine_arguments
from .engine_process import EngineProcess
from .errors import RequestFailed, TidemillError
from .in_flight import InFlight

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

CHAT: Final = "/v1/chat/completions"
EMBEDDINGS: Final = "/v1/embeddings"
_TEXTS_PER_REQUEST = 64

Request = Mapping[str, Any] | tuple[str, Mapping[str, Any]]
"""A body, or a url and a body."""


class Engine:
    """An engine in a process of its own, which starts at once and loads in the background.

    `options` are the flags of `tidemill run` for model and engine, with underscores
    (`max_num_seqs=64`). The process ends with `close`, with this one, or when the engine is
    forgotten. Methods may be called from any thread and any event loop, and wait for the model;
    they raise EngineDied once the process has ended.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        try:
            given = EngineOptions(model=model, **options)
            require_engine("an engine", given.model)
        except CliError as exc:
            raise TidemillError(str(exc)) from exc
        command = [sys.executable, "-m", "tidemill.cli.engine.process", *engine_arguments(given)]
        self._process = EngineProcess(command)
        self._close = weakref.finalize(self, self._process.close)

    async def answer(self, body: Mapping[str, Any], *, url: str = CHAT) -> dict[str, Any]:
        """Return the body of the response; raises RequestFailed for a request that failed.

        Cancelling it ends the request.
        """
        return await asyncio.wrap_future(self._process.send(url, body))

    def answer_many(
        self,
        requests: Iterable[Request] | AsyncIterable[Request],
        *,
        url: str = CHAT,
        in_order: bool = True,
        max_inflight: int | None = None,
    ) -> Answers:
        """Return the answers to many requests, to iterate over with `for` or `async for`.

        A failed request gives its RequestFailed in its place. So many requests are taken at a time
        as the engine needs; there may be no end of them. Without `in_order` answers come as they
        are finished, each with its place: `(3, {…})`.
        """
        return Answers(self._process, requests, url, in_order, max_inflight)

    def embed(self, texts: Iterable[str], **params: Any) -> NDArray[np.float32]:
        """Return the vectors of texts, a row each; `params` are those of `/v1/embeddings`."""
        import numpy as np

        remaining, bodies = iter(texts), []
        while some := list(islice(remaining, _TEXTS_PER_REQUEST)):
            bodies.append({**params, "input": some, "encoding_format": "base64"})
        vectors = []
        for answer in self.answer_many(bodies, url=EMBEDDINGS):
            if isinstance(answer, RequestFailed):
                raise answer
            vectors += [np.frombuffer(b64decode(one["embedding"]), "<f4") for one in answer["data"]]
        return np.stack(vectors) if vectors else np.zeros((0, 0), np.float32)

    def answer_table(self, table: Any, **recipe: Any) -> pa.Table:
        """Return a table with the answers to its rows beside its columns, as `tidemill run` does.

        `table` is a `pyarrow.Table`, a data frame or whatever Arrow can read; `recipe` has the keys
        of a recipe (`prompt="Label: {{ text }}"`). Raises TidemillError for one that cannot work;
        a row that fails says so in column `error`.
        """
        from .tables import answer_table

        return answer_table(self._process, table, recipe)

    def info(self) -> EngineInfo:
        """Return model, device and limits, once the model is loaded."""
        return self._process.info()

    @property
    def pid(self) -> int:
        """Return the id of the engine's process, once the model is loaded."""
        return self._process.pid()

    def stats(self) -> EngineStats:
        """Return how much runs and waits, and totals since the start."""
        return self._process.stats()

    def close(self) -> None:
        """End the process; requests in flight raise EngineDied."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)


class Answers:
    """Answers to many requests; `for` or `async for` takes them, once."""

    def __init__(
        self,
        process: EngineProcess,
        requests: Iterable[Request] | AsyncIterable[Request],
        url: str,
        in_order: bool,  # noqa: FBT001 - as `answer_many` was called
        max_inflight: int | None,
    ) -> None:
        self._process = process
        self._requests = requests
        self._url = url
        self._in_order = in_order
        self._max_inflight = max_inflight

    def __iter__(self) -> Iterator[Any]:
        """Yield the answers; the requests must be an iterable."""
        if not isinstance(self._requests, Iterable):
            raise TypeError("these requests come from an async iterable: use `async for`")
        answered = threading.Event()
        running = InFlight[dict[str, Any]](answered.set, in_order=self._in_order)
        remaining, limit = iter(self._requests), self._limit()
        try:
            while True:
                answered.clear()
                for request in islice(remaining, limit - len(running)):
                    running.add(self._send(request))
                if not running:
                    return
                for place, answer in running.take():
                    yield answer if self._in_order else (place, answer)
                if running:
                    answered.wait()
        finally:
            running.cancel()

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Yield the answers; the requests may be an async iterable."""
        answered, loop = asyncio.Event(), asyncio.get_running_loop()

        def notify() -> None:
            with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                loop.call_soon_threadsafe(answered.set)

        running = InFlight[dict[str, Any]](notify, in_order=self._in_order)
        remaining, is_more = aiter(_as_async(self._requests)), True
        limit = await asyncio.to_thread(self._limit)
        try:
            while is_more or running:
                answered.clear()
                while is_more and len(running) < limit:
                    try:
                        running.add(self._send(await anext(remaining)))
                    except StopAsyncIteration:
                        is_more = False
                for place, answer in running.take():
                    yield answer if self._in_order else (place, answer)
                if running:
                    await answered.wait()
        finally:
            running.cancel()

    def _limit(self) -> int:
        return self._max_inflight or self._process.max_inflight()

    def _send(self, request: Request) -> Future[dict[str, Any]]:
        url, body = request if isinstance(request, tuple) else (self._url, request)
        return self._process.send(url, body)


async def _as_async(requests: Iterable[Request] | AsyncIterable[Request]) -> AsyncIterator[Request]:
    if isinstance(requests, AsyncIterable):
        async for request in requests:
            yield request
        return
    for request in requests:
        yield request
