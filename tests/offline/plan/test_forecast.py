"""The end of a run is forecast from a tenth of its work on, whatever its lines are like."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from tests.offline.plan.test_order import chat, index_of
from tidemill.engine.speculation.cost_model import CostModel, Work
from tidemill.offline.plan.forecast import Done, Forecast
from tidemill.offline.plan.plan import Plan

NUM_SEQUENCES = 32
BYTES_A_TOKEN = 5
COSTS = Work(steps=0.05, prefilled=0.0005, decoded=0.0005, attended=5e-7)


class Request(NamedTuple):
    """A line: its prompt, the most tokens of its answer and those it comes to."""

    prompt: str
    max_tokens: int
    output_tokens: int


def words(rng: random.Random, num_tokens: int) -> str:
    """Return a unique text of a number of tokens."""
    return "".join(rng.choices("abcdefgh", k=BYTES_A_TOKEN * num_tokens))


def alike(rng: random.Random) -> list[Request]:
    """Prompts and answers as long as any other."""
    return [Request(words(rng, 150), 64, 64) for _ in range(600)]


def heavy_tail(rng: random.Random) -> list[Request]:
    """A few answers that are many times as long as most."""
    lengths = [min(512, int(8 * rng.paretovariate(0.9))) for _ in range(900)]
    return [Request(words(rng, 60), length, length) for length in lengths]


def prompts_first(rng: random.Random) -> list[Request]:
    """Half of the lines read much and write little, the other half the other way."""
    reading = [Request(words(rng, 800), 8, 8) for _ in range(300)]
    return reading + [Request(words(rng, 20), 128, 128) for _ in range(300)]


def ends_early(rng: random.Random) -> list[Request]:
    """Answers that end long before their limit, of two kinds of prompts."""
    kinds = [(words(rng, 100), 10), (words(rng, 100), 100)]
    return [
        Request(head + words(rng, 30), 2048, rng.randint(mean // 2, mean * 3 // 2))
        for head, mean in (rng.choice(kinds) for _ in range(1_600))
    ]


def documents(rng: random.Random) -> list[Request]:
    """Questions to documents that are computed once."""
    texts = [words(rng, 600) for _ in range(30)]
    return [Request(rng.choice(texts) + words(rng, 20), 64, 64) for _ in range(600)]


def forecasts(
    requests: list[Request],
    *,
    is_ordered: bool,
    costs: Work = COSTS,
    remembered: CostModel | None = None,
) -> list[tuple[float, float | None]]:
    """Run a file through steps of a known cost; return seconds, and what was forecast then."""
    estimates: list[tuple[float, float | None]] = []
    with index_of([chat(one.prompt, one.max_tokens) for one in requests]) as index:
        plan = Plan(index, lambda _: False, is_ordered=is_ordered)
        forecast = Forecast(plan, NUM_SEQUENCES, remembered)
        places, running = iter(plan), dict[int, int]()
        done, seconds, cached = Done(), 0.0, set[str]()
        while True:
            prefilled = 0
            while len(running) < NUM_SEQUENCES and (place := next(places, None)) is not None:
                prompt = requests[place].prompt
                num_tokens, head = len(prompt) // BYTES_A_TOKEN, prompt[:500]
                own = num_tokens
                if head in cached:
                    own = 20 if num_tokens > 500 else 30
                cached.add(head)
                prefilled += own
                running[place] = 0
            if not running:
                return [*estimates, (seconds, 0.0)]
            attended = sum(
                len(requests[place].prompt) // BYTES_A_TOKEN + decoded
                for place, decoded in running.items()
            )
            step = Work(1, prefilled, len(running), attended)
            seconds += float(np.dot(costs, step))
            work = Work(*(old + new for old, new in zip(done.work, step, strict=True)))
            done = done._replace(work=work)
            for place in [*running]:
                running[place] += 1
                if running[place] == requests[place].output_tokens:
                    del running[place]
                    plan.finish([place], [requests[place].output_tokens])
                    done = done._replace(
                        row_prompt_tokens=done.row_prompt_tokens
                        + len(requests[place].prompt) // BYTES_A_TOKEN,
                        row_output_tokens=done.row_output_tokens + requests[place].output_tokens,
                    )
            done = done._replace(num_waiting=plan.num_waiting, num_running=len(running))
            if seconds - forecast.num_seconds >= 1:
                forecast.update(seconds, done)
                estimates.append((seconds, forecast.seconds_left()))


@pytest.mark.parametrize("is_ordered", [True, False], ids=["plan", "no plan"])
@pytest.mark.parametrize("make", [alike, heavy_tail, prompts_first, ends_early, documents])
def test_the_end_is_forecast(
    make: Callable[[random.Random], list[Request]], *, is_ordered: bool
) -> None:
    """Within 20 % of the whole after a tenth of it, and within 10 % from half on."""
    check(forecasts(make(random.Random(2)), is_ordered=is_ordered))


@pytest.mark.parametrize("step_seconds", [0.03, 0.2])
def test_costs_that_are_not_as_usual_are_known_from_runs_before(step_seconds: float) -> None:
    """They are used before the file reaches the lines that reveal them."""
    costs = COSTS._replace(steps=step_seconds)
    remembered = CostModel()
    for work in (Work(100, 2_000, 1_000, 90_000), Work(5, 9_000, 100, 50_000)):
        remembered.add(work, float(np.dot(costs, work)))
    requests = prompts_first(random.Random(2))
    check(forecasts(requests, is_ordered=True, costs=costs, remembered=remembered))


def check(estimates: list[tuple[float, float | None]]) -> None:
    """Compare the forecasts with the bounds."""
    whole = estimates[-1][0]
    for seconds, left in estimates:
        if seconds >= 0.1 * whole:
            assert left is not None
            bound = 0.1 if seconds >= 0.5 * whole else 0.2
            assert abs(seconds + left - whole) <= bound * whole, (seconds, left, whole)


def test_embeddings_are_forecast_by_what_they_read() -> None:
    """Nothing is generated, whatever a line that names no limit may write."""
    rng = random.Random(1)
    with index_of([chat(words(rng, 100)) for _ in range(40)]) as index:
        plan = Plan(index, lambda _: False, is_ordered=False)
        forecast = Forecast(plan, NUM_SEQUENCES)
        for place in range(10):
            plan.finish([place], [0])
        read = plan.finished_prompt_bytes
        forecast.update(10.0, Done(Work(10, read), row_prompt_tokens=read, num_waiting=30))
        left = plan.num_own_bytes - read
        assert forecast.seconds_left() == pytest.approx(10 * left / read, rel=0.05)


@pytest.mark.parametrize("num_sequences", [8, 32, 2_000])
@pytest.mark.parametrize("make", [alike, heavy_tail, prompts_first])
def test_steps_are_those_of_lines_that_start_when_others_end(
    make: Callable[[random.Random], list[Request]], num_sequences: int
) -> None:
    """They are within 20% of a queue with that many servers, in file order."""
    requests = make(random.Random(2))
    ends = [0] * num_sequences
    for request in requests:
        heapq.heapreplace(ends, ends[0] + request.output_tokens)
    with index_of([chat(one.prompt, one.max_tokens) for one in requests]) as index:
        plan = Plan(index, lambda _: False, is_ordered=False)
        assert plan.expected_steps(num_sequences) == pytest.approx(max(ends), rel=0.2)
        for _ in zip(range(50), plan, strict=False):
            pass  # lines that have started count as before
        assert plan.expected_steps(num_sequences) == pytest.approx(max(ends), rel=0.2)


def test_prompts_that_are_computed_again_are_forecast_by_the_lines_that_wait() -> None:
    """A small excess over the lines' own tokens is ignored; once all have begun, none is left."""
    with index_of([chat("a" * 500 + str(number)) for number in range(40)]) as index:
        plan = Plan(index, lambda _: False)
        forecast = Forecast(plan, NUM_SEQUENCES)
        forecast.update(10.0, Done(Work(20, 900, 200, 30_000)))
        assert forecast._prefills_left() == 0
        forecast.update(20.0, Done(Work(40, 1800, 200, 30_000), num_waiting=30))
        assert forecast._prefills_left() == pytest.approx(5400)


def test_answers_that_outlive_what_was_expected_are_not_over_at_once() -> None:
    """The short ones ended first: those that run have as many tokens to come, or their limit."""
    with index_of([chat(f"{number}", 100) for number in range(20)]) as index:
        plan = Plan(index, lambda _: False)
        forecast = Forecast(plan, 20)
        places = list(plan)
        for place in places[:8]:
            plan.finish([place], [5])
        done = Done(Work(40, 100, 8 * 5 + 12 * 40, 1_000), 40, 8 * 5, 0, 12)
        forecast.update(10.0, done)
        assert forecast._work_left().decoded == 12 * 40
        assert forecast._work_left().steps == 40
        done = done._replace(work=Work(90, 100, 8 * 5 + 12 * 90, 5_000))
        forecast.update(20.0, done)
        assert forecast._work_left().decoded == 12 * 10
