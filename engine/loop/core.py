"""Engine core: schedules and runs requests of one task in steps, each of which brings events.

Generation is one kind. Another (vectors of an encoder, text of a recording) is another class behind
the same four verbs; the thread knows none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Generic, NamedTuple, Protocol, TypeVar

from tidemill.protocol.contract import EngineStats

from ..scheduling.token_logprobs import NO_LOGPROBS, TokenLogprobs

RequestT_contra = TypeVar("RequestT_contra", contravariant=True)
ResultT_co = TypeVar("ResultT_co", covariant=True)
ResultT = TypeVar("ResultT")


class RunningRequest(Protocol[ResultT_co]):
    """A request that runs, known by its identity."""

    def result(self) -> ResultT_co:
        """Return what it came to, once finished; raises its `RequestError` if it failed."""


class StepOutput(NamedTuple, Generic[ResultT]):
    """Output of a step for one request: its new token ids since the last one, and its end.

    Each request has one output that is finished, its last; after that its `result` may be read.
    Others come only for what is streamed, since an event costs more than a token. Where they were
    asked for, there is one of `new_logprobs` for each new token, and the first event has the
    prompt's. Work whose results come in pieces, not in tokens, tells the next `part` of one.
    """

    request: RunningRequest[ResultT]
    new_token_ids: list[int]
    is_finished: bool
    new_logprobs: TokenLogprobs = NO_LOGPROBS
    prompt_logprobs: TokenLogprobs = NO_LOGPROBS
    part: ResultT | None = None


class EngineCore(Protocol[RequestT_contra, ResultT]):
    """Items in by `add`, outputs out of `step`; called by one thread, but for `stats`."""

    def add(self, request: RequestT_contra) -> RunningRequest[ResultT]:
        """Queue one item; raises `RequestError` when it could never run here."""

    def step(self) -> Sequence[StepOutput[ResultT]] | None:
        """Run one step and return what it brought; None when there is nothing to do."""

    def abort(self, unwanted: AbstractSet[object]) -> None:
        """Drop items wherever they are; no event comes of them any more."""

    def stats(self) -> EngineStats:
        """Return what runs, waits and was done; readable from another thread.

        Raises `EngineError` when it is known that nothing can be done any more.
        """
