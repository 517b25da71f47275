"""Contract of an endpoint: pure functions before and after the engine, and a media fetch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from tidemill.protocol.bodies import usage_body
from tidemill.protocol.contract import Reply, Usage
from tidemill.protocol.routes import Route
from tidemill.protocol.stream import StreamOptions

from ..scheduling.token_logprobs import TokenLogprobs
from .text_draft import TextDraft


class EngineResult(Protocol):
    """The engine's result for one request."""

    @property
    def num_values(self) -> int:
        """Return the approximate number of values in its body, which printing depends on."""


RequestT = TypeVar("RequestT")
ContextT = TypeVar("ContextT")
ResultT_contra = TypeVar("ResultT_contra", bound=EngineResult, contravariant=True)


@dataclass(frozen=True, slots=True)
class RequestMetadata:
    """Metadata of a request: the requested model name, an id, and a time.

    `request_id` also seeds a request without `seed`; `created` (in seconds since the epoch) is
    the time that a template may use. `adapter` is the number of the named adapter, 0 for the
    model itself. An interactive request has a `priority`, and the lowest number comes first;
    a row of a file has none, and comes after them. With `shows_cached_tokens` its usage includes
    the number of cached prompt tokens.
    """

    model: str
    request_id: str
    created: int
    adapter: int = 0
    priority: int | None = None
    shows_cached_tokens: bool = False

    @property
    def is_interactive(self) -> bool:
        """Return whether it is not a row of a file."""
        return self.priority is not None

    def usage_body(self, usage: Usage, reasoning_tokens: int | None = None) -> dict[str, Any]:
        """Return the usage object of the reply; `reasoning_tokens` is None without reasoning."""
        return usage_body(
            usage.prompt_tokens,
            usage.completion_tokens,
            reasoning_tokens=reasoning_tokens,
            cached_tokens=usage.cached_tokens if self.shows_cached_tokens else None,
        )


@dataclass(frozen=True, slots=True)
class Prepared(Generic[RequestT, ContextT]):
    """A body as requests to the engine; its endpoint stores `context` for the answer.

    `num_bytes` is the size of media in its requests, such as samples. `num_values` is the size of
    the parts of the answer that come from no request. With `may_follow`, further requests may
    follow its results: see `FollowUps`.
    """

    requests: Sequence[RequestT]
    context: ContextT
    metadata: RequestMetadata
    num_bytes: int = 0
    num_values: int = 0
    may_follow: bool = False


FetchStep = Callable[[dict[str, Any]], AbstractAsyncContextManager[dict[str, Any]] | None]
"""Media fetch: a context with the body that includes its media; raises `RequestError`.

None for a body without media.
"""

BodyCheck = Callable[[dict[str, Any]], object]
"""Raises `RequestError` for a body that is invalid regardless of its URLs' contents."""


class FetchingEndpoint(Protocol):
    """An endpoint whose bodies may contain media URLs.

    `prepare` receives the body from `fetched`, including the media. It runs in a thread, however
    small the body, and stays pure.
    """

    @property
    def fetched(self) -> FetchStep:
        """Return the media fetch that precedes `prepare`."""


class DraftingEndpoint(Protocol[RequestT, ContextT]):
    """An endpoint whose texts are tokenized together with those of other rows of a file."""

    def draft(
        self, body: dict[str, Any], metadata: RequestMetadata
    ) -> TextDraft[Prepared[RequestT, ContextT]] | None:
        """Draft what `prepare` returns; None for a body that is better prepared in a thread."""


class Endpoint(Protocol[RequestT, ResultT_contra, ContextT]):
    """Turns one kind of body into requests to the engine, and their results into a reply.

    Both functions may run in any thread. Neither changes its arguments or keeps state: the same
    arguments give the same value.
    """

    @property
    def route(self) -> Route:
        """Return the URLs of this endpoint."""

    def prepare(
        self, body: dict[str, Any], metadata: RequestMetadata
    ) -> Prepared[RequestT, ContextT]:
        """Return requests to the engine; raises `RequestError` for an invalid body."""

    def finish(
        self, prepared: Prepared[RequestT, ContextT], results: Sequence[ResultT_contra]
    ) -> Reply:
        """Return the reply; `results` are in the order of `prepared.requests`."""


@runtime_checkable
class FollowUps(Protocol):
    """An endpoint, or a part of one, whose results may need further requests."""

    def follow_up(
        self, prepared: Prepared[Any, Any], results: Sequence[Any]
    ) -> Prepared[Any, Any] | None:
        """Return the body with further requests after those with results, None if it is unchanged.

        It is called again with the results of all requests, until there are no further ones.
        """


class OutputDelta(Protocol):
    """New output of a sequence since the engine's last event."""

    @property
    def new_token_ids(self) -> Sequence[int]:
        """Return the new tokens."""

    @property
    def new_logprobs(self) -> TokenLogprobs:
        """Return one for each new token, if logprobs were requested."""

    @property
    def prompt_logprobs(self) -> TokenLogprobs:
        """Return the prompt's logprobs in the first event, if they were requested."""

    @property
    def part(self) -> Any:
        """Return the new part of the result, for work that yields no tokens."""


class ResponseStream(Protocol):
    """One streamed response; the deltas that it has sent are its only state.

    All chunks together contain the reply of `finish`.
    """

    def add(self, place: int, delta: OutputDelta, result: Any) -> list[dict[str, Any]]:
        """Return the chunks for new output of the request at this place.

        `result` is the request's result with its last event, and None before.
        """

    def end(self) -> list[dict[str, Any]]:
        """Return the chunks that follow once every request is finished."""


@runtime_checkable
class FollowedStream(ResponseStream, Protocol):
    """A streamed response whose last deltas need the results of further requests."""

    def follow(self, prepared: Prepared[Any, Any], results: Sequence[Any]) -> None:
        """Receive all results, before the last delta of each request."""


@runtime_checkable
class StreamingEndpoint(Protocol):
    """An endpoint that can stream its responses."""

    def stream(self, prepared: Prepared[Any, Any], options: StreamOptions) -> ResponseStream:
        """Return the response stream of a body, before any output."""
