"""Many callers, one thread: answers, cancellations, and an end that every caller is notified of."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.engine.loop.generation_rig import Rig
from tests.engine.paged_model import Tokens, spread_logits
from tidemill.engine.errors import EngineClosed, ModelRefused, RankFailed
from tidemill.engine.loop.core import StepOutput
from tidemill.engine.loop.engine import Engine, _Call
from tidemill.engine.scheduling.sequence import Sampling, Sequence, SequenceRequest, SequenceResult
from tidemill.protocol.contract import EngineStats
from tidemill.protocol.errors import InternalError, RequestError

GREEDY = Sampling(temperature=0)
logits_of = spread_logits(11)
PATIENCE_SECONDS = 120  # far more than any test needs: only a hang reaches it

pytestmark = pytest.mark.usefixtures("steps_ahead")


def request(first: int = 1, max_tokens: int = 8, **other: Any) -> SequenceRequest:
    """Return a greedy request."""
    return SequenceRequest([first, 2, 3], max_tokens, GREEDY, **other)


def greedy(first: int, count: int = 8) -> list[int]:
    """Return the scripted model's output."""
    tokens = [first, 2, 3]
    for _ in range(count):
        tokens.append(int(np.argmax(logits_of(tuple(tokens)))))
    return tokens[3:]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for another thread's work."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - the other thread knows no event loop
            await asyncio.sleep(0.001)


async def test_the_reason_of_an_engines_end_is_the_original_message() -> None:
    """The function for its end is called exactly once."""
    rig, ended = Rig(logits_of), list[str]()
    rig.model.fails = lambda _: RankFailed("rank 1: it was ended")
    engine = Engine(lambda: rig.work, lambda: ended.append("once"))
    with pytest.raises(EngineClosed, match="the engine stopped: rank 1: it was ended"):
        await engine.generate([request()])
    engine.close()
    assert ended == ["once"]


async def test_requests_to_an_ended_engine_get_the_reason() -> None:
    """Its statistics raise it too, so that a monitor learns of it without requests."""
    rig = Rig(logits_of)
    rig.model.fails = lambda _: RuntimeError("CUDA error")
    rig.model.is_gone = True
    engine = Engine(lambda: rig.work)
    for _ in range(2):
        with pytest.raises(EngineClosed, match="the engine stopped: the device has failed"):
            await engine.generate([request()])
    with pytest.raises(EngineClosed, match="the device has failed"):
        engine.stats()
    engine.close()


def test_the_function_for_the_end_is_called_if_nothing_began() -> None:
    """An example is a refused model that other processes are loading too."""
    ended = list[str]()

    def make() -> Any:
        raise ModelRefused("no")

    with pytest.raises(ModelRefused):
        Engine(make, lambda: ended.append("once"))
    assert ended == ["once"]


async def test_a_failing_end_keeps_no_caller_waiting() -> None:
    """It holds for the engine's creator and for its callers."""

    def refuse() -> Any:
        raise ModelRefused("no")

    def fail() -> None:
        raise RuntimeError("the end failed")

    refusals = list[ModelRefused]()

    def begin() -> None:
        try:
            Engine(refuse, fail)
        except ModelRefused as exc:
            refusals.append(exc)

    beginning = threading.Thread(target=begin, daemon=True)
    beginning.start()
    beginning.join(PATIENCE_SECONDS)
    assert refusals
    rig = Rig(logits_of)
    rig.model.fails = lambda _: RankFailed("rank 1: it was ended")
    engine = Engine(lambda: rig.work, fail)
    with pytest.raises(EngineClosed, match="rank 1: it was ended"):
        await asyncio.wait_for(engine.generate([request()]), PATIENCE_SECONDS)
    engine.close()


class Stage:
    """An engine over a scripted model whose steps can be held up and made to fail.

    `is_held` keeps the engine's thread inside a step until `release`.
    """

    def __init__(self) -> None:
        self.rig = Rig(logits_of)
        self.model = self.rig.model
        self.model.fails = self._wait
        self.engine = Engine(lambda: self.rig.work)
        self.in_step = threading.Event()
        self._may_go = threading.Event()
        self._may_go.set()
        self._holds_streams = False

    def hold_once_emitted(self) -> None:
        """Make the first step wait whose predecessor emitted a token to a stream.

        It is called before anything runs.
        """
        self.in_step.clear()
        self._holds_streams = True

    def hold(self) -> None:
        """Make the next step wait."""
        self.in_step.clear()
        self._may_go.clear()

    def release(self) -> None:
        """Let steps run."""
        self._may_go.set()

    async def until_in_step(self) -> None:
        """Wait until the engine's thread is inside a step."""
        assert await asyncio.to_thread(self.in_step.wait, PATIENCE_SECONDS)

    async def until_idle(self) -> None:
        """Wait until nothing runs or waits and every page is free."""

        def is_idle() -> bool:
            now = self.engine.stats()
            return not (now.running or now.waiting or now.kv_cache_usage)

        await until(is_idle)

    def _wait(self, sequences: list[Sequence]) -> Exception | None:
        if self._holds_streams:
            if not any(one.num_emitted for one in sequences):
                return None
            self._holds_streams = False
            self.hold()
        self.in_step.set()
        assert self._may_go.wait(PATIENCE_SECONDS)
        return None


@pytest.fixture(name="stage")
def fixture_stage() -> Iterator[Stage]:
    """An engine that is closed in the end."""
    stage = Stage()
    yield stage
    stage.release()
    stage.engine.close()


async def answered(awaitable: Any) -> list[SequenceResult]:
    """Wait for an answer, but not forever."""
    results: list[SequenceResult] = await asyncio.wait_for(awaitable, PATIENCE_SECONDS)
    return results


async def test_a_call_gets_its_results_in_the_order_of_its_requests(stage: Stage) -> None:
    """The first is the longest, but is still returned first."""
    requests = [request(first, 9 - first) for first in range(1, 6)]
    results = await answered(stage.engine.generate(requests))
    assert [one.token_ids for one in results] == [greedy(i, 9 - i) for i in range(1, 6)]


async def test_many_callers_each_get_their_own_results(stage: Stage) -> None:
    """There are more callers than sequences that run at once."""
    calls = [stage.engine.generate([request(i % 11), request(i % 7)]) for i in range(60)]
    answers = await answered(asyncio.gather(*calls))
    for i, results in enumerate(answers):
        assert [one.token_ids for one in results] == [greedy(i % 11), greedy(i % 7)]
    await stage.until_idle()


async def test_an_idle_engine_takes_up_work_again(stage: Stage) -> None:
    """Its thread sleeps in between and wakes up."""
    for first in range(3):
        (answer,) = await answered(stage.engine.generate([request(first)]))
        assert answer.token_ids == greedy(first)
        await stage.until_idle()


def test_callers_of_several_loops_are_served(stage: Stage) -> None:
    """Each in its own thread."""
    answers: dict[int, list[int]] = {}

    def call(first: int) -> None:
        (answer,) = asyncio.run(answered(stage.engine.generate([request(first)])))
        answers[first] = answer.token_ids

    threads = [threading.Thread(target=call, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert answers == {first: greedy(first) for first in range(4)}


async def test_no_requests_have_no_results(stage: Stage) -> None:
    """The call must not hang."""
    assert await answered(stage.engine.generate([])) == []


async def test_a_request_that_cannot_run_fails_its_call_alone(stage: Stage) -> None:
    """Its siblings of the same call are dropped, other calls continue."""
    good = asyncio.create_task(stage.engine.generate([request()]))
    with pytest.raises(RequestError):
        await answered(stage.engine.generate([request(), SequenceRequest([], 1), request(5, 40)]))
    assert (await answered(good))[0].token_ids == greedy(1)
    await stage.until_idle()


async def test_a_request_that_breaks_on_arrival_fails_its_call_alone(stage: Stage) -> None:
    """It includes a request that no endpoint would send."""
    odd = SequenceRequest(None, 1)  # type: ignore[arg-type]
    with pytest.raises(InternalError):
        await answered(stage.engine.generate([request(), odd]))
    assert (await answered(stage.engine.generate([request()])))[0].token_ids == greedy(1)
    await stage.until_idle()


async def test_a_sequence_that_fails_fails_its_call_alone(stage: Stage) -> None:
    """The error comes after its siblings have ended; other calls have their results."""
    culprit = request(7)
    stage.model.fails = lambda running: (
        RuntimeError("bad") if culprit in {one.request for one in running} else None
    )
    good = asyncio.create_task(stage.engine.generate([request()]))
    with pytest.raises(InternalError, match="bad"):
        await answered(stage.engine.generate([request(), culprit]))
    assert (await answered(good))[0].token_ids == greedy(1)
    await stage.until_idle()


async def test_cancelling_a_call_frees_its_pages(stage: Stage) -> None:
    """Other calls continue."""
    stage.hold()
    dropped = asyncio.create_task(stage.engine.generate([request(5, 50), request(6, 50)]))
    remaining = asyncio.create_task(stage.engine.generate([request()]))
    await stage.until_in_step()
    dropped.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dropped
    stage.release()
    assert (await answered(remaining))[0].token_ids == greedy(1)
    await stage.until_idle()
    assert stage.engine.stats().prompt_tokens == 3  # of the remaining call


async def test_a_call_cancelled_before_it_was_admitted_never_runs(stage: Stage) -> None:
    """It waited while a step was running."""
    stage.hold()
    remaining = asyncio.create_task(stage.engine.generate([request()]))
    await stage.until_in_step()
    dropped = asyncio.create_task(stage.engine.generate([request(5, 50)]))
    await asyncio.sleep(0)
    dropped.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dropped
    stage.engine._has_left = False  # as if the thread had checked between put and cancel
    stage.release()
    assert (await answered(remaining))[0].token_ids == greedy(1)
    await stage.until_idle()
    assert stage.engine.stats().prompt_tokens == 3


async def test_cancelling_everything_leaves_an_engine_that_serves(stage: Stage) -> None:
    """The thread goes back to sleep and wakes up."""
    stage.hold()
    calls = [asyncio.create_task(stage.engine.generate([request(i, 50)])) for i in range(20)]
    await stage.until_in_step()
    for call in calls:
        call.cancel()
    done = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError) for one in done)
    stage.release()
    await stage.until_idle()
    assert (await answered(stage.engine.generate([request()])))[0].token_ids == greedy(1)


async def test_closing_notifies_all_callers(stage: Stage) -> None:
    """It includes running and new calls; the current step ends first."""
    stage.hold()
    running = asyncio.create_task(stage.engine.generate([request(1, 50)]))
    await stage.until_in_step()
    unseen = asyncio.create_task(stage.engine.generate([request(2, 50)]))
    await asyncio.sleep(0)
    closing = asyncio.create_task(asyncio.to_thread(stage.engine.close))
    await until(lambda: stage.engine._is_closed)
    stage.release()
    await asyncio.wait_for(closing, PATIENCE_SECONDS)
    for call in (running, unseen):
        with pytest.raises(EngineClosed):
            await answered(call)


async def test_a_closed_engine_rejects_calls_and_can_be_closed_again(stage: Stage) -> None:
    """It rejects them at once, from any thread."""
    stage.engine.close()
    stage.engine.close()
    await asyncio.to_thread(stage.engine.close)
    with pytest.raises(EngineClosed):
        await answered(stage.engine.generate([request()]))


async def test_a_call_that_comes_while_the_engine_closes_is_refused(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was accepted, but the thread has already read its inbox for the last time."""
    inbox = stage.engine._inbox

    class SlowInbox:
        """An inbox that is read to the end just before the call's group arrives."""

        def put(self, group: object) -> None:
            """Close the engine first."""
            monkeypatch.setattr(stage.engine, "_inbox", inbox)
            stage.engine.close()
            inbox.put(group)  # type: ignore[arg-type]

    monkeypatch.setattr(stage.engine, "_inbox", SlowInbox())
    with pytest.raises(EngineClosed):
        await answered(stage.engine.generate([request()]))


class PanicException(BaseException):
    """The exception that Rust libraries raise."""


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ("plan", ZeroDivisionError),
        ("launch", ZeroDivisionError),
        ("collect", ZeroDivisionError),
        ("plan", PanicException),
    ],
)
async def test_a_dead_thread_notifies_every_caller(
    stage: Stage,
    part: str,
    kind: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No caller waits forever; the reason is raised and logged, and later calls are rejected."""

    def die(*_: object) -> None:
        raise kind("a bug of ours")

    stage.hold()
    running = asyncio.create_task(stage.engine.generate([request(1, 50)]))
    await stage.until_in_step()
    unseen = asyncio.create_task(stage.engine.generate([request(2)]))
    await asyncio.sleep(0)
    monkeypatch.setattr(stage.rig.scheduler, part, die)
    stage.release()
    for call in (running, unseen):
        with pytest.raises(EngineClosed, match=f"{kind.__name__}: a bug of ours"):
            await answered(call)
    with pytest.raises(EngineClosed):
        await answered(stage.engine.generate([request()]))
    assert "a bug of ours" in caplog.text
    stage.engine.close()


def test_a_caller_whose_loop_is_gone_disturbs_no_other(stage: Stage) -> None:
    """Its answer cannot be delivered, and the rest of its call is dropped."""
    stage.hold()

    async def leave() -> None:
        loop = asyncio.get_running_loop()
        stage.engine._inbox.put(_Call([request(3), request(4, 50)], loop, lambda _: None))
        await stage.until_in_step()

    asyncio.run(leave())
    stage.release()
    (answer,) = asyncio.run(answered(stage.engine.generate([request()])))
    assert answer.token_ids == greedy(1)
    asyncio.run(stage.until_idle())
    assert stage.engine.stats().prompt_tokens == 6


async def test_a_request_that_leaves_midway_frees_room_for_one_that_waits() -> None:
    """With pages for one alone, the second runs only once the first is dropped."""
    gate = threading.Event()

    def slow(tokens: Tokens) -> Any:
        if tokens[0] == 5 and len(tokens) > 10:
            gate.wait(PATIENCE_SECONDS)
        return logits_of(tokens)

    rig = Rig(slow, num_pages=6, max_num_seqs=1, max_model_len=24)
    engine = Engine(lambda: rig.work)
    first = asyncio.create_task(engine.generate([request(5, 21)]))
    second = asyncio.create_task(engine.generate([request(1, 8)]))
    await until(lambda: engine.stats().running > 0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    gate.set()
    assert (await answered(second))[0].token_ids == greedy(1)
    assert rig.pool.num_free == 6
    engine.close()


def test_a_core_that_cannot_be_created_raises_in_the_constructor() -> None:
    """The model loads in the engine's thread; its error must not be lost there."""

    def refuse() -> Lengths:
        raise ModelRefused("no such model")

    with pytest.raises(ModelRefused, match="no such model"):
        Engine(refuse)


async def test_a_stream_yields_each_token_of_streamed_requests(stage: Stage) -> None:
    """Each has the place of its request; other requests yield all tokens at their end."""
    requests = [request(1, 5, is_streamed=True), request(2, 6), request(3, 7, is_streamed=True)]
    emitted: list[list[list[int]]] = [[], [], []]
    last = []
    async with asyncio.timeout(PATIENCE_SECONDS):
        async for place, event in stage.engine.stream(requests):
            emitted[place].append(event.new_token_ids)
            if event.is_finished:
                last.append((place, event.request.result().token_ids))
    assert emitted[0] == [[token] for token in greedy(1, 5)]
    assert emitted[1] == [greedy(2, 6)]
    assert emitted[2] == [[token] for token in greedy(3, 7)]
    assert last == [(0, greedy(1, 5)), (1, greedy(2, 6)), (2, greedy(3, 7))]


@pytest.mark.parametrize("leaves", ["closes", "is cancelled", "lets go"])
async def test_an_abandoned_stream_drops_its_sequences(stage: Stage, leaves: str) -> None:
    """It drops them within a step, however its reader leaves; other calls continue."""
    stage.hold_once_emitted()
    remaining = asyncio.create_task(stage.engine.generate([request()]))
    stream = stage.engine.stream([request(5, 50, is_streamed=True), request(6, 50)])
    async with asyncio.timeout(PATIENCE_SECONDS):
        await anext(stream)
        await stage.until_in_step()
        if leaves == "closes":
            await stream.aclose()
        elif leaves == "is cancelled":
            reading = asyncio.ensure_future(read(stream))
            await asyncio.sleep(0.01)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        del stream
        await asyncio.sleep(0.01)
    stage.release()
    assert (await answered(remaining))[0].token_ids == greedy(1)
    await stage.until_idle()
    assert stage.engine.stats().prompt_tokens == 3  # of the remaining call


async def read(stream: AsyncIterator[object]) -> None:
    """Read a stream to its end."""
    async for _ in stream:
        pass


class Lengths:
    """A core of another kind, like an encoder's: one step for everything that waits."""

    def __init__(self) -> None:
        self._waiting: list[Length] = []

    def add(self, request: str) -> Length:
        """Queue a text."""
        if not request:
            raise RequestError("There is nothing to measure.")
        self._waiting.append(Length(request))
        return self._waiting[-1]

    def step(self) -> list[StepOutput[float]] | None:
        """Measure all waiting texts."""
        waiting, self._waiting = self._waiting, []
        return [StepOutput(length, [], is_finished=True) for length in waiting] or None

    def abort(self, unwanted: AbstractSet[object]) -> None:
        """Forget texts."""
        self._waiting = [length for length in self._waiting if length not in unwanted]

    def stats(self) -> EngineStats:
        """Return the number of waiting texts."""
        return EngineStats(waiting=len(self._waiting))


@dataclass(eq=False)
class Length:
    """One text and its result."""

    text: str

    def result(self) -> float:
        """Return its length."""
        return float(len(self.text))


async def test_the_engine_runs_work_of_any_kind() -> None:
    """It passes requests and results without knowing their types."""
    engine = Engine(Lengths)
    assert await asyncio.gather(engine.generate(["one", "four"]), engine.generate(["eleven"])) == [
        [3, 4],
        [6],
    ]
    with pytest.raises(RequestError, match="nothing to measure"):
        await engine.generate(["one", ""])
    assert engine.stats().waiting == 0
    engine.close()


async def test_seconds_are_counted_by_cause() -> None:
    """The causes add up to the time of the engine's thread, which excludes waiting for requests."""
    rig = Rig(logits_of)
    began = time.perf_counter()
    engine = Engine(lambda: rig.work)
    await engine.generate([request(first) for first in range(4)])
    await asyncio.to_thread(engine.close)
    stats, seconds = engine.stats(), time.perf_counter() - began
    causes = stats.step_seconds_by_cause
    assert all(causes[name] > 0 for name in ("scheduling", "launching", "waiting_for_tokens"))
    assert sum(causes.values()) == pytest.approx(stats.step_seconds)
    assert 0 < stats.step_seconds < seconds
