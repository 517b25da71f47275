"""Engine for Python programs: a process of its own, asked from any thread, task or notebook."""

from __future__ import annotations

import asyncio
import json
import weakref
from base64 import b64decode
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Iterable,
    Iterator,
    Mapping,
    Sized,
)
from concurrent.futures import Future
from contextlib import AbstractContextManager, aclosing, suppress
from dataclasses import fields
from difflib import get_close_matches
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Self

from tidemill.offline.arguments.parser import Parser
from tidemill.offline.console.errors import CliError, Refused
from tidemill.offline.engine.demo_model import with_demo_model
from tidemill.offline.engine.engine import require_engine
from tidemill.offline.engine.options import (
    EngineOptions,
    add_engine_flags,
    engine_arguments,
    engine_command,
    engine_fields,
    stall_limit,
)
from tidemill.protocol.contract import EngineInfo, EngineStats
from tidemill.protocol.validation import short_repr

from .engine_process import EngineProcess
from .errors import RequestFailed, TidemillError
from .in_flight import InFlight, Sent, answers_to
from .progress import Progress, progress_of
from .public import public

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

CHAT: Final = "/v1/chat/completions"
EMBEDDINGS: Final = "/v1/embeddings"
_TEXTS_PER_REQUEST = 64
_END: Final = object()
"""Stands for the end of an async iterable, which may yield any malformed request."""

Request = Mapping[str, Any] | tuple[str, Mapping[str, Any]]
"""A body, or a url and a body."""


@public
class Engine:
    """An engine in a process of its own, which starts at once and loads in the background.

    `options` are the flags of `tidemill run` for model and engine, with underscores
    (`max_num_seqs=64`). The process ends with `close`, with this one, or when the engine is
    forgotten. Methods may be called from any thread and any event loop, and wait for the model;
    they raise EngineDied once the process has ended.

    >>> with Engine(max_num_seqs=64) as engine:
    ...     engine.info().max_num_seqs
    64
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        try:
            given = options_of({"model": model, **options})
            require_engine("an engine", given.model)
        except CliError as exc:
            raise TidemillError(str(exc)) from exc
        command = engine_command(with_demo_model(given), "--own-weights")
        self.process = EngineProcess(command, stall_seconds=stall_limit(given))
        self._close = weakref.finalize(self, self.process.close)

    async def answer(self, body: Mapping[str, Any], *, url: str = CHAT) -> dict[str, Any]:
        """Return the body of the response; raises RequestFailed for a request that failed.

        Cancelling it ends the request.

        >>> ask = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
        >>> answer = asyncio.run(engine.answer({**ask, "temperature": 0}))
        >>> "Paris" in answer["choices"][0]["message"]["content"]
        True
        """
        return await asyncio.wrap_future(self.process.send(url, body).future)

    def answer_one(self, body: Mapping[str, Any], *, url: str = CHAT) -> dict[str, Any]:
        """Wait for the body of the response, as `answer` returns it to a program with `await`.

        >>> ask = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
        >>> answer = engine.answer_one({**ask, "temperature": 0})
        >>> "Paris" in answer["choices"][0]["message"]["content"]
        True
        """
        future = self.process.send(url, body).future
        try:
            return future.result()
        finally:
            future.cancel()

    def answer_many(
        self,
        requests: Iterable[Request] | AsyncIterable[Request],
        *,
        url: str = CHAT,
        in_order: bool = True,
        max_inflight: int | None = None,
        progress: bool = True,
    ) -> Answers:
        """Return the answers to many requests, to iterate over with `for` or `async for`.

        A failed request gives its RequestFailed in its place. So many requests are taken at a time
        as the engine needs; there may be no end of them. Without `in_order` answers come as they
        are finished, each with its place: `(3, {…})`. A notebook and a terminal show a bar unless
        `progress` is False.

        >>> ask = {"messages": [{"role": "user", "content": "What is the capital of Japan?"}]}
        >>> answer, failed = engine.answer_many([{**ask, "temperature": 0}, {"messages": []}])
        >>> "Tokyo" in answer["choices"][0]["message"]["content"], failed.message
        (True, '`messages` must not be empty; got a list.')
        """
        return Answers(self, requests, url, in_order, max_inflight, progress=progress)

    def embed(
        self, texts: Iterable[str], *, progress: bool = True, **params: Any
    ) -> NDArray[np.float32]:
        """Return the vectors of texts, a row each; `params` are those of `/v1/embeddings`.

        `engine.embed(["ebb", "flow"]).shape` is `(2, 384)` of a model of that many dimensions.
        """
        import numpy as np

        remaining, bodies = iter(texts), []
        while some := list(islice(remaining, _TEXTS_PER_REQUEST)):
            bodies.append({**params, "input": some, "encoding_format": "base64"})
        vectors = []
        num_texts = sum(len(body["input"]) for body in bodies)
        with progress_of("texts", num_texts, is_wanted=progress) as shown:
            for answer in self.answer_many(bodies, url=EMBEDDINGS, progress=False):
                if isinstance(answer, RequestFailed):
                    raise answer
                data = answer["data"]
                vectors += [np.frombuffer(b64decode(one["embedding"]), "<f4") for one in data]
                shown.add(len(data))
        return np.stack(vectors) if vectors else np.zeros((0, 0), np.float32)

    def answer_table(self, table: Any, *, progress: bool = True, **recipe: Any) -> pa.Table:
        """Return a table with the answers to its rows beside its columns, as `tidemill run` does.

        `table` is a `pyarrow.Table`, a data frame, a `datasets.Dataset`, a list of dicts, the path
        of a table or whatever Arrow can read; `recipe` has the keys of a recipe
        (`prompt="Label: {{ text }}"`). Raises TidemillError for one that cannot work; a row that
        fails says so in column `error`.

        >>> cities = {"country": ["France", "Japan"]}
        >>> prompt = "What is the capital of {{ country }}?"
        >>> found = engine.answer_table(cities, prompt=prompt, params={"temperature": 0})
        >>> ["Paris" in text or "Tokyo" in text for text in found.column("text").to_pylist()]
        [True, True]
        """
        from .tables import answer_table

        return answer_table(self.process, table, recipe, progress=progress)

    def info(self) -> EngineInfo:
        """Return model, device and limits, once the model is loaded."""
        return self.process.info()

    @property
    def pid(self) -> int:
        """Return the id of the engine's process, once the model is loaded."""
        return self.process.pid()

    def stats(self) -> EngineStats:
        """Return how much runs and waits, and totals since the start."""
        return self.process.stats()

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
        engine: Engine,
        requests: Iterable[Request] | AsyncIterable[Request],
        url: str,
        in_order: bool,  # noqa: FBT001 - as `answer_many` was called
        max_inflight: int | None,
        *,
        progress: bool,
    ) -> None:
        self._engine = engine  # which would end its process if it were forgotten
        self._requests = requests
        self._url = url
        self._in_order = in_order
        self._max_inflight = max_inflight
        self._progress = progress

    def __iter__(self) -> Iterator[Any]:
        """Yield the answers; the requests must be an iterable."""
        if not isinstance(self._requests, Iterable):
            raise TypeError("these requests come from an async iterable: use `async for`")
        sent = map(self._send, self._requests)
        limit = self._limit()
        with self._shown() as shown:
            for place, answer in answers_to(sent, limit, in_order=self._in_order):
                shown.add(is_failed=isinstance(answer, RequestFailed))
                yield answer if self._in_order else (place, answer)

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Yield the answers; the requests may be an async iterable."""
        limit = await asyncio.to_thread(self._limit)
        with self._shown() as shown:
            async with aclosing(self._in_loop(limit)) as answers:
                async for place, answer in answers:
                    shown.add(is_failed=isinstance(answer, RequestFailed))
                    yield answer if self._in_order else (place, answer)

    async def _in_loop(self, limit: int) -> AsyncGenerator[tuple[int, Any], None]:
        """Yield the answers and their places."""
        answered, loop = asyncio.Event(), asyncio.get_running_loop()

        def notify() -> None:
            with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                loop.call_soon_threadsafe(answered.set)

        remaining, is_more = aiter(_as_async(self._requests)), True
        reading: asyncio.Task[Any] | None = None
        running = InFlight[dict[str, Any]](limit, notify, in_order=self._in_order)
        try:
            while is_more or running:
                # In a task of its own: the source may wait for answers itself.
                if is_more and reading is None and not running.is_full:
                    reading = asyncio.create_task(_next(remaining))
                waiting = asyncio.create_task(answered.wait())
                parts = {waiting} if reading is None else {waiting, reading}
                await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                answered.clear()
                if reading is not None and reading.done():
                    if (request := reading.result()) is _END:
                        is_more = False
                    else:
                        running.add(self._send(request))
                    reading = None
                for found in running.take():
                    yield found
        finally:
            if reading is not None:
                reading.cancel()
            running.cancel()

    def _shown(self) -> AbstractContextManager[Progress]:
        total = len(self._requests) if isinstance(self._requests, Sized) else None
        return progress_of("requests", total, is_wanted=self._progress)

    def _limit(self) -> int:
        return self._max_inflight or self._engine.process.max_inflight()

    def _send(self, request: Request) -> Sent[dict[str, Any]]:
        try:
            return self._engine.process.send(*self._pair_of(request))
        except TypeError as exc:
            failed: Future[dict[str, Any]] = Future()
            failed.set_exception(
                RequestFailed(str(exc), status_code=400, code="invalid_json", param=None)
            )
            return Sent(failed, 0)

    def _pair_of(self, request: object) -> tuple[str, Mapping[str, Any]]:
        """Return the url and the body of a request; raises TypeError for another value."""
        match request:
            case Mapping():
                return self._url, request
            case (str(url), Mapping() as body):
                return url, body
        raise TypeError(
            f"the request must be a body, or a pair such as ('{CHAT}', body); it is "
            f"{short_repr(request)}"
        )


def options_of(given: Mapping[str, Any]) -> EngineOptions:
    """Return options as their flags are read; raises Refused for what is no option or value."""
    known = [option.name for option in fields(EngineOptions)]
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f": did you mean `{near[0]}`?" if near else ""
            raise Refused(f"an engine has no option `{name}`{hint}")
    texts: dict[str, Any] = {
        name: json.dumps(value) if isinstance(value, Mapping) else value
        for name, value in given.items()
    }
    parser = Parser(prog="tidemill run", allow_abbrev=False)
    add_engine_flags(parser)
    return EngineOptions(
        **engine_fields(parser.parse_args(engine_arguments(EngineOptions(**texts))))
    )


async def _next(requests: AsyncIterator[Request]) -> Any:
    return await anext(requests, _END)


async def _as_async(requests: Iterable[Request] | AsyncIterable[Request]) -> AsyncIterator[Request]:
    if isinstance(requests, AsyncIterable):
        async for request in requests:
            yield request
        return
    for request in requests:
        yield request
