"""What an endpoint is: a pure function on either side of the engine, and what may go before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from engine.contract import Reply
from engine.protocol.routes import Route
from engine.protocol.stream import StreamOptions
from engine.scheduling.sequence import TokenLogprob


class Sized(Protocol):
    """What the engine makes of one request."""

    @property
    def num_values(self) -> int:
        """Return about how many values a body would show of it, which is what that costs."""


RequestT = TypeVar("RequestT")
ContextT = TypeVar("ContextT")
ResultT_contra = TypeVar("ResultT_contra", bound=Sized, contravariant=True)


@dataclass(frozen=True, slots=True)
class Heading:
    """What stands in a response beside the answer: the model's name as asked for, an id, a time.

    `request_id` also keys the randomness of a request that names no seed; `created` (seconds since
    the epoch) is the time that a template may ask for. `adapter` is what the name means, 0 for the
    model itself. `priority` is 1 where somebody waits for the answer, 0 for a line of a file.
    """

    model: str
    request_id: str
    created: int
    adapter: int = 0
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Prepared(Generic[RequestT, ContextT]):
    """A body as the engine runs it; `context` is what its endpoint keeps for the answer.

    `num_bytes` is what its requests hold beside text, such as samples.
    """

    requests: Sequence[RequestT]
    context: ContextT
    heading: Heading
    num_bytes: int = 0


Fetched = Callable[[dict[str, Any]], AbstractAsyncContextManager[dict[str, Any]] | None]
"""While entered, a body with what its urls name brought in; raises `RequestError`.

None for a body that has nothing to be brought, nor to be unfolded.
"""

Check = Callable[[dict[str, Any]], object]
"""Raises `RequestError` for what is wrong with a body, whatever its urls bring."""


@runtime_checkable
class Fetches(Protocol):
    """What an endpoint is, too, whose bodies name by a url what is to be prepared.

    `prepare` then gets the body that `fetched` has made of the one that came, in a thread, however
    small it is; it stays pure.
    """

    @property
    def fetched(self) -> Fetched:
        """Return the step before `prepare`, which may wait for others."""


class Endpoint(Protocol[RequestT, ResultT_contra, ContextT]):
    """Turns one kind of body into requests of the engine, and their results into a reply.

    Both functions may run in any thread. Neither changes what it is given, nor knows what else
    runs: the same arguments give the same value.
    """

    @property
    def route(self) -> Route:
        """Return the urls that this endpoint answers."""

    def prepare(self, body: dict[str, Any], heading: Heading) -> Prepared[RequestT, ContextT]:
        """Return what the engine shall run; raises `RequestError` for what is wrong in the body."""

    def finish(
        self, prepared: Prepared[RequestT, ContextT], results: Sequence[ResultT_contra]
    ) -> Reply:
        """Return the reply; `results` are in the order of `prepared.requests`."""


class Told(Protocol):
    """What the engine tells of a sequence on its way, since it last did."""

    @property
    def new_token_ids(self) -> Sequence[int]:
        """Return the tokens that came."""

    @property
    def new_logprobs(self) -> Sequence[TokenLogprob]:
        """Return one for each of them, where they were asked for."""

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprob | None]:
        """Return the prompt's, the first time, where they were asked for."""

    @property
    def part(self) -> Any:
        """Return the piece of the result that came, of work that tells no tokens."""


class Unfolding(Protocol):
    """One answer as it comes; it knows what it has told, and nothing else changes.

    All of the chunks put together say what `finish` would.
    """

    def add(self, place: int, told: Told, result: Any) -> list[dict[str, Any]]:
        """Return the chunks of what came for the request at this place.

        `result` is what it came to, once it is finished, and None before.
        """

    def end(self) -> list[dict[str, Any]]:
        """Return what follows once every request is finished."""


@runtime_checkable
class Unfolds(Protocol):
    """What an endpoint is, too, that can answer piece by piece."""

    def unfold(self, prepared: Prepared[Any, Any], options: StreamOptions) -> Unfolding:
        """Return the answer to a body before anything of it has come."""
