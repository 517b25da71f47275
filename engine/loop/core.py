"""Engine core: schedules and runs the requests of one task in steps; each step yields events.

Generation is one task. Another (an encoder's vectors, a recording's text) is another class with the
same four methods; the engine's thread knows none of them.
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
        """Return the result of a finished request; raise its `RequestError` if it failed."""


class StepOutput(NamedTuple, Generic[ResultT]):
    """Output of a step for one request: its new token ids since the last one, and its end.

    Each request has one finished output, its last; after that its `result` may be read. Other
    outputs come only for streamed requests, since an event costs more than a token. If logprobs
    were requested, `new_logprobs` has one entry per new token, and the first event has the
    prompt's. Tasks whose results consist of pieces instead of tokens put the next one in `part`.
    """

    request: RunningRequest[ResultT]
    new_token_ids: list[int]
    is_finished: bool
    new_logprobs: TokenLogprobs = NO_LOGPROBS
    prompt_logprobs: TokenLogprobs = NO_LOGPROBS
    part: ResultT | None = None


class EngineCore(Protocol[RequestT_contra, ResultT]):
    """Requests in through `add`, outputs out of `step`; only `stats` is called by other threads."""

    def add(self, request: RequestT_contra) -> RunningRequest[ResultT]:
        """Queue one item; raises `RequestError` if it can never run here."""

    def step(self) -> Sequence[StepOutput[ResultT]] | None:
        """Run one step and return its outputs; None if there is nothing to do."""

    def abort(self, unwanted: AbstractSet[object]) -> None:
        """Drop items at any stage; they yield no more events."""

    def stats(self) -> EngineStats:
        """Return counts of running, waiting and finished work; callable from another thread.

        Raises `EngineError` if no work can be done any more.
        """
