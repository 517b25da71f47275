"""Dispatcher: runs any URL and body through its endpoint and the engine, and returns one reply.

With `stream` in the body the reply comes in chunks. Long work on bodies and responses runs in
threads, under backpressure.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any, TypeVar, cast

from tidemill.protocol.bodies import error_body
from tidemill.protocol.constraints.request import AUTOMATON_FIELDS, asks_for_automaton
from tidemill.protocol.contract import EngineError, EngineInfo, EngineStats, Reply, StreamedReply
from tidemill.protocol.errors import InternalError, RequestError
from tidemill.protocol.in_flight import InFlightLimiter
from tidemill.protocol.names import name_of_model, own_names
from tidemill.protocol.requests import interactive_priority, num_sequences
from tidemill.protocol.routes import UNKNOWN_URL, not_served
from tidemill.protocol.stream import (
    STREAM_NOT_SUPPORTED,
    StreamOptions,
    no_stream,
    refuse_stream,
    stream_options,
)
from tidemill.protocol.validation import printable

from ..loop.core import StepOutput
from ..loop.engine import Engine
from .backpressure import SHORT_BYTES, BoundedExecutor, body_size
from .endpoint import (
    DraftingEndpoint,
    Endpoint,
    EngineResult,
    FetchingEndpoint,
    FollowedStream,
    FollowUps,
    Prepared,
    RequestMetadata,
    ResponseStream,
    StreamingEndpoint,
)
from .text_batches import TextBatcher

_logger = logging.getLogger(__name__)

_MAX_NAME_CHARS = 200
_INTERACTIVE = 1  # the executor of interactive requests; that of rows of files is 0
# Limits on media: concurrent decoding, fetched bytes, and decoded bytes that wait for the engine.
_MAX_DECODING = 4
_MAX_FETCHED_BYTES = 64 * 2**20
_MAX_HELD_BYTES = 512 * 2**20
# A row up to this size is prepared faster inline than in a thread.
_SHORT_LINE_BYTES = 500
# Each additional sequence takes as long to prepare as this number of bytes.
_SEQUENCE_BYTES = 100
# Each additional chat, which a template renders, takes as long as this number of bytes.
_CHAT_BYTES = 1_000
# Threads that compile constraints, for each class, whatever a body's size.
_MAX_COMPILING = 2
# Each value of a result becomes about 400 bytes of a body, and takes some microseconds.
_SHORT_VALUES = 1_000
_VALUES_A_LOGPROB = 20
# Errors that vLLM's dialect returns as a plain message.
_BARE_CODES = frozenset({UNKNOWN_URL, STREAM_NOT_SUPPORTED})


RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT", bound=EngineResult)
_AnswerT = TypeVar("_AnswerT", bound=Reply | StreamedReply)


class Dispatcher:
    """Answers requests through the endpoints of one model, run by `engine`; implements `Online`.

    `online` endpoints serve only interactive requests. `model_names` are the names that requests
    may use, or `ANY_MODEL` for every name; the first proper name is the default. Requests may also
    use `adapters`, the names of LoRA adapters.
    """

    def __init__(
        self,
        endpoints: Iterable[Endpoint[RequestT, ResultT, Any]],
        engine: Engine[RequestT, ResultT],
        info: EngineInfo,
        *,
        model_names: Sequence[str],
        adapters: Sequence[str] = (),
        online: Iterable[Endpoint[RequestT, ResultT, Any]] = (),
        shows_cached_tokens: bool = False,
    ) -> None:
        if not own_names(model_names):
            raise ValueError("model_names must contain at least one model name")
        offline = list(endpoints)
        self._endpoints = EndpointTable(offline)
        self._online = EndpointTable([*offline, *online])
        self._engine: Engine[Any, Any] = engine
        # One executor per class: interactive requests never queue behind rows of files.
        # Threads take at most half of the cores; the rest is for the event loop and the model's
        # step.
        num_threads = max(1, (os.cpu_count() or 1) // 2)
        self._preparing = (
            BoundedExecutor(short_bytes=_SHORT_LINE_BYTES, num_threads=num_threads),
            BoundedExecutor(interactive=True),
        )
        self._reading = TextBatcher(_SHORT_LINE_BYTES)
        self._compiling = (_compile_executor(), _compile_executor())
        self._finishing = (
            BoundedExecutor(short_bytes=_SHORT_VALUES),
            BoundedExecutor(short_bytes=_SHORT_VALUES, interactive=True),
        )
        self._preparing_fetched = BoundedExecutor(_MAX_FETCHED_BYTES, short_bytes=-1)
        self._decoding = asyncio.Semaphore(_MAX_DECODING)
        self._decoded_bytes = InFlightLimiter(_MAX_HELD_BYTES)
        self._info = info
        self._shows_cached_tokens = shows_cached_tokens
        self._model_names = (*model_names, *adapters)
        self._adapters = dict.fromkeys(model_names, 0)
        self._adapters |= {name: number for number, name in enumerate(adapters, start=1)}

    async def respond(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        """Answer one request; an invalid request gets an error reply.

        Raises `EngineError` only if the engine is gone and cannot answer any more requests. The
        order of checks is: the URL, `stream`, `model`, the rest of the body.
        """
        return await _always_reply(self._reply(url, body, request_id, created), request_id)

    async def answer(
        self, url: str, body: dict[str, Any], request_id: str, created: int
    ) -> Reply | StreamedReply:
        """Answer one request as `respond` does, streamed if its body sets `stream`."""
        return await _always_reply(
            self._reply_or_stream(url, body, request_id, created), request_id
        )

    async def _reply(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        endpoint = self._endpoints.find(url)
        refuse_stream(body)
        return await self._run(endpoint, body, self._heading(body, request_id, created))

    async def _reply_or_stream(
        self, url: str, body: dict[str, Any], request_id: str, created: int
    ) -> Reply | StreamedReply:
        endpoint = self._online.find(url)
        options = stream_options(body) if "stream" in body else None
        heading = self._heading(body, request_id, created)
        metadata = replace(heading, priority=interactive_priority(body))
        if options is None:
            return await self._run(endpoint, body, metadata)
        if not isinstance(endpoint, StreamingEndpoint):
            raise no_stream(url)
        chunks = self._chunks(endpoint, body, metadata, options)
        await anext(chunks)
        return StreamedReply(chunks)

    def _heading(self, body: dict[str, Any], request_id: str, created: int) -> RequestMetadata:
        name = body.get("model")
        if not isinstance(name, str) or name not in self._adapters:
            name = name_of_model(body, self._model_names)
        return RequestMetadata(
            name,
            request_id,
            created,
            self._adapters.get(name, 0),
            shows_cached_tokens=self._shows_cached_tokens,
        )

    async def _run(
        self, endpoint: Endpoint[Any, Any, Any], body: dict[str, Any], metadata: RequestMetadata
    ) -> Reply:
        async with AsyncExitStack() as stack:
            prepared = await self._prepare(endpoint, body, metadata, stack)
            results: Sequence[Any] = await self._engine.generate(prepared.requests)
            if prepared.may_follow:
                assert isinstance(endpoint, FollowUps)
                prepared, results = await self._followed_up(endpoint, prepared, results)
            size = prepared.num_values + sum(result.num_values for result in results)
            executor = self._finishing[metadata.is_interactive]
            reply = await executor.run(size, endpoint.finish, prepared, results)
            return reply._replace(is_long=size > _SHORT_VALUES)

    async def _followed_up(
        self, endpoint: FollowUps, prepared: Prepared[Any, Any], results: Sequence[Any]
    ) -> tuple[Prepared[Any, Any], Sequence[Any]]:
        """Return the requests and results of a body, with those that follow."""
        executor = self._finishing[prepared.metadata.is_interactive]
        while True:
            size = sum(result.num_values for result in results)
            extended = await executor.run(size, endpoint.follow_up, prepared, results)
            prepared = prepared if extended is None else extended
            further = [
                replace(request, priority=prepared.metadata.priority)
                for request in prepared.requests[len(results) :]
            ]
            if not further:
                return prepared, results
            more: Sequence[Any] = await self._engine.generate(further)
            results = [*results, *more]

    async def _chunks(
        self,
        endpoint: Endpoint[Any, Any, Any],
        body: dict[str, Any],
        metadata: RequestMetadata,
        options: StreamOptions,
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield an empty chunk with the first token, then the chunks of the answer.

        An error before the first token is the reply; a later one is the last chunk.
        """
        assert isinstance(endpoint, StreamingEndpoint)
        has_started = False
        async with AsyncExitStack() as stack:
            try:
                prepared = await self._prepare(endpoint, body, metadata, stack)
                response = endpoint.stream(prepared, options)
                requests = [replace(request, is_streamed=True) for request in prepared.requests]
                outputs = await stack.enter_async_context(aclosing(self._engine.stream(requests)))
                if prepared.may_follow:
                    outputs = self._with_follow_ups(endpoint, response, prepared, outputs)
                    outputs = await stack.enter_async_context(aclosing(outputs))
                async for place, output in outputs:
                    result = output.request.result() if output.is_finished else None
                    if not has_started:
                        has_started = True
                        yield {}
                    for chunk in await self._add_delta(response, place, output, result):
                        yield chunk
                for chunk in response.end():
                    yield chunk
            except Exception as error:
                if not has_started:
                    raise
                yield _error_reply(_request_error(error, metadata.request_id)).body

    async def _with_follow_ups(
        self,
        endpoint: Endpoint[Any, Any, Any],
        response: ResponseStream,
        prepared: Prepared[Any, Any],
        outputs: AsyncIterator[tuple[int, StepOutput[Any]]],
    ) -> AsyncGenerator[tuple[int, StepOutput[Any]], None]:
        """Yield outputs; the last of each request after the stream has all further results."""
        assert isinstance(endpoint, FollowUps)
        assert isinstance(response, FollowedStream)
        last: dict[int, StepOutput[Any]] = {}
        async for place, output in outputs:
            if output.is_finished:
                last[place] = output
            else:
                yield place, output
        ended = [last[place].request.result() for place in range(len(prepared.requests))]
        followed, results = await self._followed_up(endpoint, prepared, ended)
        size = sum(result.num_values for result in results)
        await self._finishing[_INTERACTIVE].run(size, response.follow, followed, results)
        for each in last.items():
            yield each

    async def _add_delta(
        self, response: ResponseStream, place: int, output: StepOutput[Any], result: Any
    ) -> list[dict[str, Any]]:
        """Return the chunks of an event; logprobs of a long prompt are serialized in a thread."""
        num_values = sum(
            len(scores) * max(_VALUES_A_LOGPROB, 1 + scores.num_top)
            for scores in (output.new_logprobs, output.prompt_logprobs)
        )
        if num_values <= _SHORT_VALUES:
            return response.add(place, output, result)
        executor = self._finishing[_INTERACTIVE]
        return await executor.run(num_values, response.add, place, output, result)

    async def _prepare(
        self,
        endpoint: Endpoint[Any, Any, Any],
        body: dict[str, Any],
        metadata: RequestMetadata,
        stack: AsyncExitStack,
    ) -> Prepared[Any, Any]:
        """Return a prepared body; its media count against the limits until `stack` exits."""
        # Not `isinstance`: a protocol's check takes longer than the rest of a short row.
        fetched = None
        if hasattr(endpoint, "fetched"):
            fetched = cast("FetchingEndpoint", endpoint).fetched(body)
        if fetched is None and not metadata.is_interactive and hasattr(endpoint, "draft"):
            size, drafting = body_size(body), cast("DraftingEndpoint[Any, Any]", endpoint)
            draft = drafting.draft(body, metadata) if size <= SHORT_BYTES else None
            if draft is not None:
                return await self._reading.read(draft, size)
        if fetched is None:
            is_constrained = not AUTOMATON_FIELDS.isdisjoint(body) and asks_for_automaton(body)
            executors = self._compiling if is_constrained else self._preparing
            executor = executors[metadata.is_interactive]
            size = body_size(body)
            if (num_chats := getattr(endpoint, "chats_per_text", 0)) > 0:
                size = num_chats * size + _CHAT_BYTES * (num_chats * num_sequences(body) - 1)
            elif "questions" in body:  # the input is tokenized once per read
                size *= num_sequences(body)
            elif metadata.is_interactive or "n" in body:
                size += _SEQUENCE_BYTES * (num_sequences(body) - 1)
            prepared = await executor.run(size, endpoint.prepare, body, metadata)
        else:
            # Only a few media are fetched or decoded at a time.
            async with fetched as whole, self._decoding:
                size = body_size(whole, _MAX_FETCHED_BYTES)
                prepared = await self._preparing_fetched.run(
                    size, endpoint.prepare, whole, metadata
                )
                await stack.enter_async_context(self._decoded_bytes.reserve(prepared.num_bytes))
        if not metadata.is_interactive:
            return prepared
        requests = [replace(request, priority=metadata.priority) for request in prepared.requests]
        return replace(prepared, requests=requests)

    def info(self) -> EngineInfo:
        """Return the engine's model, device and limits."""
        return self._info

    def stats(self) -> EngineStats:
        """Return a snapshot of the work; callable from any thread."""
        tokenizing = (
            *self._preparing,
            *self._compiling,
            self._preparing_fetched,
            self._reading,
        )
        return replace(
            self._engine.stats(),
            tokenize_seconds=sum(executor.seconds for executor in tokenizing),
            detokenize_seconds=sum(executor.seconds for executor in self._finishing),
        )

    def close(self) -> None:
        """Stop the engine after the step now running."""
        self._engine.close()


def _compile_executor() -> BoundedExecutor:
    return BoundedExecutor(short_bytes=-1, num_threads=_MAX_COMPILING)


class EndpointTable:
    """Finds the endpoint of a URL."""

    def __init__(self, endpoints: Sequence[Endpoint[Any, Any, Any]]) -> None:
        self._endpoints = endpoints
        self._by_url = {url: each for each in endpoints for url in each.route.exact}

    def find(self, url: str) -> Endpoint[Any, Any, Any]:
        """Return the endpoint of a URL; raise `RequestError` if there is none."""
        if (exact := self._by_url.get(url)) is not None:
            return exact
        for endpoint in self._endpoints:
            if endpoint.route.matches(url):
                return endpoint
        raise not_served(url, [endpoint.route.name for endpoint in self._endpoints])


async def _always_reply(answer: Awaitable[_AnswerT], request_id: str) -> _AnswerT | Reply:
    """Return an answer, or the error reply for an exception."""
    try:
        return await answer
    except EngineError:
        raise  # the engine is gone: it cannot reply
    except Exception as error:  # noqa: BLE001 - reported in the reply, and logged
        return _error_reply(_request_error(error, request_id))


def _request_error(error: Exception, request_id: str) -> RequestError:
    if isinstance(error, RequestError):
        return error
    if not isinstance(error, EngineError):
        _logger.error("request %s failed", request_id, exc_info=error)
    return InternalError(f"The engine failed: {type(error).__name__}.")


def _error_reply(error: RequestError) -> Reply:
    body = error_body(error)
    error_fields = body["error"]
    error_fields["message"] = printable(error.message)
    error_fields["param"] = None if error.param is None else printable(error.param, _MAX_NAME_CHARS)
    return Reply(error.status_code, body, bare_message=error.code in _BARE_CODES)
