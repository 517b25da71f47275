"""The engine behind its endpoints: any url and body in, one reply out, whatever happens.

Where a stream is asked for, and may be, the reply comes in chunks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from engine.backpressure import InFlight
from engine.contract import EngineInfo, EngineStats, Reply, StreamedReply
from engine.endpoints.endpoint import (
    Endpoint,
    Fetches,
    Heading,
    Prepared,
    Sized,
    Told,
    Unfolding,
    Unfolds,
)
from engine.endpoints.turns import Turns, size_of_body
from engine.errors import EngineError
from engine.protocol.bodies import error_body
from engine.protocol.constraints import asks_for_automaton
from engine.protocol.errors import InternalError, RequestError
from engine.protocol.names import name_of_model, own_names
from engine.protocol.routes import UNKNOWN_URL, not_served
from engine.protocol.stream import (
    STREAM_NOT_SUPPORTED,
    StreamOptions,
    no_stream,
    refuse_stream,
    stream_options,
)
from engine.protocol.validation import printable

_logger = logging.getLogger(__name__)

_MAX_NAME_CHARS = 200
_WAITED_FOR = 1  # the priority of a request that somebody waits for; that of a line is 0
# Recordings: so many are decoded at once, of so many bytes, and their samples wait for the engine.
_MAX_UNFOLDING = 4
_MAX_FETCHED_BYTES = 64 * 2**20
_MAX_HELD_BYTES = 512 * 2**20
# Constraints are compiled in so many threads for each priority, whatever a body's size.
_MAX_COMPILING = 2
# Of a result's values each becomes about 400 bytes of a body, and takes some microseconds.
_SHORT_VALUES = 1_000
_VALUES_A_LOGPROB = 20
# The failures that vLLM's dialect prints as a plain message.
_BARE_CODES = frozenset({UNKNOWN_URL, STREAM_NOT_SUPPORTED})


RequestT = TypeVar("RequestT")
RequestT_contra = TypeVar("RequestT_contra", contravariant=True)
ResultT = TypeVar("ResultT", bound=Sized)
ResultT_co = TypeVar("ResultT_co", bound=Sized, covariant=True)
_AnswerT = TypeVar("_AnswerT", bound=Reply | StreamedReply)


class Item(Protocol[ResultT_co]):
    """One of the requests that run."""

    def result(self) -> ResultT_co:
        """Return what it came to, once finished; raises its `RequestError` if it failed."""


class Event(Told, Protocol[ResultT_co]):
    """What is told of one that is streamed, each time that something has come."""

    @property
    def item(self) -> Item[ResultT_co]:
        """Return what it is told of."""

    @property
    def is_finished(self) -> bool:
        """Say whether it is the last."""


class StepLoop(Protocol[RequestT_contra, ResultT_co]):
    """What runs below the endpoints."""

    async def generate(self, requests: Sequence[RequestT_contra]) -> Sequence[ResultT_co]:
        """Run the requests of one body together and return their results in the same order.

        Raises `RequestError` when one of them can never run (it needs more KV cache than there
        is): all of them then fail. Cancelling the call drops what it asked for.
        """

    def stream(
        self, requests: Sequence[RequestT_contra]
    ) -> AsyncGenerator[tuple[int, Event[ResultT_co]], None]:
        """Run them so, too, and yield what comes, each with the place of its request.

        Closing the iterator drops what it asked for.
        """

    def stats(self) -> EngineStats:
        """Return a snapshot of the work; callable from any thread."""

    def close(self) -> None:
        """Stop after the step now running."""


class ServedEngine:
    """Answers requests through the endpoints of one model, which `engine` runs; an `Online`.

    Only people who wait are answered by the `online` ones. `model_names` are the names that
    requests may ask for, `ANY_MODEL` among them for every name; the first that is a name stands in
    where none is given. `adapters` are names of adapters, which requests may ask for, too.
    """

    def __init__(
        self,
        endpoints: Iterable[Endpoint[RequestT, ResultT, Any]],
        engine: StepLoop[RequestT, ResultT],
        info: EngineInfo,
        *,
        model_names: Sequence[str],
        adapters: Sequence[str] = (),
        online: Iterable[Endpoint[RequestT, ResultT, Any]] = (),
    ) -> None:
        if not own_names(model_names):
            raise ValueError("an engine needs the name of its model")
        self._endpoints: list[Endpoint[Any, Any, Any]] = list(endpoints)
        self._online: list[Endpoint[Any, Any, Any]] = [*self._endpoints, *online]
        self._engine: StepLoop[Any, Any] = engine
        # By priority: who is waited for has turns of its own, behind no line of a file.
        self._preparing = (Turns(), Turns(alternate=True))
        self._compiling = (_compiling_turns(), _compiling_turns())
        self._finishing = (
            Turns(short_bytes=_SHORT_VALUES),
            Turns(short_bytes=_SHORT_VALUES, alternate=True),
        )
        self._preparing_fetched = Turns(_MAX_FETCHED_BYTES, short_bytes=-1)
        self._unfolding = asyncio.Semaphore(_MAX_UNFOLDING)
        self._unfolded = InFlight(_MAX_HELD_BYTES)
        self._info = info
        self._model_names = (*model_names, *adapters)
        self._adapters = {name: number for number, name in enumerate(adapters, start=1)}

    async def respond(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        """Answer one request; never raises for what the request holds.

        Raises `EngineError` only when the engine is gone and nothing can be answered any more.

        Looked at in this order: the url, `stream`, `model`, the rest of the body.
        """
        return await _answered_always(self._reply(url, body, request_id, created), request_id)

    async def answer(
        self, url: str, body: dict[str, Any], request_id: str, created: int
    ) -> Reply | StreamedReply:
        """Answer one request as `respond` does, piece by piece where its body asks for a stream."""
        return await _answered_always(
            self._reply_or_stream(url, body, request_id, created), request_id
        )

    async def _reply(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        endpoint = _endpoint_of(url, self._endpoints)
        refuse_stream(body)
        return await self._answered(endpoint, body, self._heading(body, request_id, created))

    async def _reply_or_stream(
        self, url: str, body: dict[str, Any], request_id: str, created: int
    ) -> Reply | StreamedReply:
        endpoint, options = _endpoint_of(url, self._online), stream_options(body)
        heading = replace(self._heading(body, request_id, created), priority=_WAITED_FOR)
        if options is None:
            return await self._answered(endpoint, body, heading)
        if not isinstance(endpoint, Unfolds):
            raise no_stream(url)
        chunks = self._chunks(endpoint, body, heading, options)
        await anext(chunks)
        return StreamedReply(chunks)

    def _heading(self, body: dict[str, Any], request_id: str, created: int) -> Heading:
        name = name_of_model(body, self._model_names)
        return Heading(name, request_id, created, self._adapters.get(name, 0))

    async def _answered(
        self, endpoint: Endpoint[Any, Any, Any], body: dict[str, Any], heading: Heading
    ) -> Reply:
        async with AsyncExitStack() as held:
            prepared = await self._prepared(endpoint, body, heading, held)
            results = await self._engine.generate(prepared.requests)
            size = sum(result.num_values for result in results)
            finishing = self._finishing[heading.priority]
            reply = await finishing.run(size, endpoint.finish, prepared, results)
            return replace(reply, is_long=size > _SHORT_VALUES)

    async def _chunks(
        self,
        endpoint: Endpoint[Any, Any, Any],
        body: dict[str, Any],
        heading: Heading,
        options: StreamOptions,
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield an empty chunk once the first token is there, then those of the answer.

        Whatever is raised before is the reply; behind it, it is the last chunk.
        """
        assert isinstance(endpoint, Unfolds)
        is_begun = False
        async with AsyncExitStack() as held:
            try:
                prepared = await self._prepared(endpoint, body, heading, held)
                unfolding = endpoint.unfold(prepared, options)
                requests = [replace(request, is_streamed=True) for request in prepared.requests]
                events = await held.enter_async_context(aclosing(self._engine.stream(requests)))
                async for place, event in events:
                    result = event.item.result() if event.is_finished else None
                    if not is_begun:
                        is_begun = True
                        yield {}
                    for chunk in await self._added(unfolding, place, event, result):
                        yield chunk
                for chunk in unfolding.end():
                    yield chunk
            except Exception as error:
                if not is_begun:
                    raise
                yield _failed(_failure_of(error, heading.request_id)).body

    async def _added(
        self, unfolding: Unfolding, place: int, event: Event[Any], result: Any
    ) -> list[dict[str, Any]]:
        """Return the chunks of an event; one with the scores of a long prompt has its turn."""
        num_values = _VALUES_A_LOGPROB * (len(event.new_logprobs) + len(event.prompt_logprobs))
        if num_values <= _SHORT_VALUES:
            return unfolding.add(place, event, result)
        turns = self._finishing[_WAITED_FOR]
        return await turns.run(num_values, unfolding.add, place, event, result)

    async def _prepared(
        self,
        endpoint: Endpoint[Any, Any, Any],
        body: dict[str, Any],
        heading: Heading,
        held: AsyncExitStack,
    ) -> Prepared[Any, Any]:
        """Return a body prepared; what it holds beside text has room until `held` is left."""
        fetched = endpoint.fetched(body) if isinstance(endpoint, Fetches) else None
        if fetched is None:
            is_constrained = asks_for_automaton(body)
            turns = self._compiling if is_constrained else self._preparing
            preparing = turns[heading.priority]
            prepared = await preparing.run(size_of_body(body), endpoint.prepare, body, heading)
        else:
            # What is fetched, and what is unfolded of it, waits for room: few of either at a time.
            async with fetched as whole, self._unfolding:
                size = size_of_body(whole, _MAX_FETCHED_BYTES)
                prepared = await self._preparing_fetched.run(size, endpoint.prepare, whole, heading)
                await held.enter_async_context(self._unfolded.held(prepared.num_bytes))
        if not heading.priority:
            return prepared
        requests = [replace(request, priority=heading.priority) for request in prepared.requests]
        return replace(prepared, requests=requests)

    def info(self) -> EngineInfo:
        """Return what runs here, and on what."""
        return self._info

    def stats(self) -> EngineStats:
        """Return a snapshot of the work; callable from any thread."""
        return self._engine.stats()

    def close(self) -> None:
        """Stop the engine after the step now running."""
        self._engine.close()


def _compiling_turns() -> Turns:
    return Turns(short_bytes=-1, num_threads=_MAX_COMPILING)


def _endpoint_of(url: str, endpoints: Sequence[Endpoint[Any, Any, Any]]) -> Endpoint[Any, Any, Any]:
    for endpoint in endpoints:
        if endpoint.route.matches(url):
            return endpoint
    raise not_served(url, [endpoint.route.name for endpoint in endpoints])


async def _answered_always(answer: Awaitable[_AnswerT], request_id: str) -> _AnswerT | Reply:
    """Return an answer, or for whatever is raised on the way to it the reply that says so."""
    try:
        return await answer
    except EngineError:
        raise  # the engine is gone: no row can tell of it
    except Exception as error:  # noqa: BLE001 - told in the reply, and logged
        return _failed(_failure_of(error, request_id))


def _failure_of(error: Exception, request_id: str) -> RequestError:
    if isinstance(error, RequestError):
        return error
    if not isinstance(error, EngineError):
        _logger.error("the request %s failed", request_id, exc_info=error)
    return InternalError(f"The engine failed: {type(error).__name__}.")


def _failed(error: RequestError) -> Reply:
    body = error_body(error)
    told = body["error"]
    told["message"] = printable(error.message)
    told["param"] = None if error.param is None else printable(error.param, _MAX_NAME_CHARS)
    return Reply(error.status_code, body, bare_message=error.code in _BARE_CODES)
