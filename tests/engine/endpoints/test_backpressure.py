"""Long work takes turns: its bytes in flight, its order, and cancelled or failed work."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.engine.endpoints.backpressure import BoundedExecutor, body_size


class Desk:
    """Processes texts when permitted; records the maximum number of bytes in flight."""

    def __init__(
        self, max_bytes: int = 100, *, is_open: bool = False, interactive: bool = False
    ) -> None:
        self.turns = BoundedExecutor(max_bytes, short_bytes=10, interactive=interactive)
        self.go_on = threading.Event()
        self.now = self.most = 0
        self.order: list[str] = []
        self._lock = threading.Lock()
        if is_open:
            self.go_on.set()

    def start(self, *texts: str) -> list[asyncio.Task[str]]:
        """Request a turn for each text."""
        return [asyncio.create_task(self.turns.run(len(text), self.work, text)) for text in texts]

    def work(self, text: str) -> str:
        """Wait for permission, then return the text."""
        with self._lock:
            self.order.append(text)
            self.now += len(text)
            self.most = max(self.most, self.now)
        self.go_on.wait()
        with self._lock:
            self.now -= len(text)
        if "bad" in text:
            raise ValueError(text)
        return text


async def settle(condition: Any) -> None:
    """Let others run until something holds."""
    while not condition():  # noqa: ASYNC110 - what is waited for happens in threads
        await asyncio.sleep(0.001)


async def test_short_work_never_waits() -> None:
    """It runs at once in the event loop's thread, although the limit is reached and others wait."""
    desk = Desk()
    tasks = desk.start("a" * 90, "b" * 90)
    await settle(lambda: desk.now == 90)
    thread = await desk.turns.run(10, threading.get_ident)
    assert thread == threading.get_ident()
    assert desk.now == 90
    desk.go_on.set()
    await asyncio.gather(*tasks)


async def test_long_work_runs_in_another_thread() -> None:
    """The event loop is free in the meantime."""
    assert await Desk().turns.run(11, threading.get_ident) != threading.get_ident()


async def test_long_work_shares_the_limit() -> None:
    """Ten texts of 40 bytes with a limit of 100 run two at a time, each with its own result."""
    desk = Desk()
    texts = [letter * 40 for letter in "abcdefghij"]
    tasks = desk.start(*texts)
    await settle(lambda: desk.now == 80)
    desk.go_on.set()
    assert await asyncio.gather(*tasks) == texts
    assert desk.most <= 100


async def test_work_above_the_limit_runs_alone() -> None:
    """It waits for earlier work, and later work waits for it."""
    desk = Desk(is_open=True)
    texts = ["a" * 60, "b" * 1_000, "c" * 60]
    assert await asyncio.gather(*desk.start(*texts)) == texts
    assert (desk.most, desk.order) == (1_000, texts)


async def test_interactive_work_on_little_waits_for_no_work_on_much() -> None:
    """A body of an eighth of the limit runs next to one that fills it, before waiting work."""
    desk = Desk(interactive=True)
    tasks = desk.start("a" * 90, *("b" * 90 for _ in range(5)), "c" * 12)
    await settle(lambda: len(desk.order) == 2)
    assert desk.order == ["a" * 90, "c" * 12]
    desk.go_on.set()
    await asyncio.gather(*tasks)


async def test_cancelled_work_keeps_its_bytes_until_its_thread_ends() -> None:
    """A thread cannot be stopped; work that had not started gives its turn to the next."""
    desk = Desk()
    working, waiting, last = desk.start("a" * 90, "b" * 90, "c" * 90)
    await settle(lambda: desk.now == 90)
    working.cancel()
    waiting.cancel()
    await asyncio.wait([working, waiting])
    assert desk.most == 90
    desk.go_on.set()
    assert await last == "c" * 90
    assert (desk.most, desk.order) == (90, ["a" * 90, "c" * 90])


async def test_work_cancelled_at_its_turn_passes_it_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its bytes are released, although it never had a thread."""
    desk = Desk()
    _, waiting, last = desk.start("a" * 90, "b" * 90, "c" * 90)
    await settle(lambda: desk.now == 90)
    leave = desk.turns._in_flight.release

    def leave_and_call_off(num_bytes: int) -> None:
        """Call the next one off when it has its turn and does not know of it yet."""
        leave(num_bytes)
        waiting.cancel()

    monkeypatch.setattr(desk.turns._in_flight, "release", leave_and_call_off)
    desk.go_on.set()
    assert await last == "c" * 90
    assert waiting.cancelled()
    assert desk.order == ["a" * 90, "c" * 90]


async def test_cancelled_work_lets_the_next_pass() -> None:
    """It waited for more bytes than were free; the next needs fewer."""
    desk = Desk()
    tasks = desk.start("a" * 60, "b" * 90, "c" * 20)
    await settle(lambda: desk.now == 60)
    tasks[1].cancel()
    async with asyncio.timeout(120):
        await settle(lambda: desk.now == 80)
    desk.go_on.set()
    assert await asyncio.gather(tasks[0], tasks[2]) == ["a" * 60, "c" * 20]


async def test_bytes_are_released_if_no_thread_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise all long work would wait forever once threads are available again."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    desk = Desk(is_open=True)
    with monkeypatch.context() as patch:
        patch.setattr(asyncio.get_running_loop(), "run_in_executor", refuse)
        with pytest.raises(RuntimeError, match="thread"):
            await desk.turns.run(90, desk.work, "a" * 90)
    async with asyncio.timeout(120):
        assert await desk.turns.run(90, desk.work, "b" * 90) == "b" * 90


async def test_failed_work_releases_its_bytes() -> None:
    """It raises its own error, and the next work runs."""
    desk = Desk(is_open=True)
    broken, good = desk.start("bad" * 30, "a" * 90)
    with pytest.raises(ValueError, match="bad"):
        await broken
    assert await good == "a" * 90


@pytest.mark.parametrize(
    ("body", "size"),
    [
        ({}, 0),
        ({"a": "four"}, 5),
        ({"a": "é😀"}, 7),
        ({"a": "\ud800"}, 2),
        ({"a": [1, 2, [3]], "b": None, "c": 10**9}, 3 + 3 + 1),
        ({"ab": [{"cd": "ef"}]}, 2 + 1 + 2 + 2),
    ],
)
def test_body_size_counts_texts_and_lists(body: dict[str, Any], size: int) -> None:
    """Texts count by bytes and lists by length, at any nesting."""
    assert body_size(body) == size


@given(
    st.recursive(
        st.text(max_size=9) | st.integers() | st.none(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    )
)
def test_no_text_of_a_body_is_overlooked(value: Any) -> None:
    """Every text counts at least its bytes."""

    def texts(value: Any) -> int:
        if isinstance(value, str):
            return len(value.encode())
        inside = value.values() if isinstance(value, dict) else value
        return sum(map(texts, inside)) if isinstance(value, (dict, list)) else 0

    assert body_size({"": value}) >= texts(value)


@pytest.mark.parametrize(
    ("body", "size"),
    [({"a": [["x"] * 9] * 100}, 101), ({"a": {"k": ["x"] * 9}, "b": "x" * 60}, 62)],
)
def test_counting_stops_above_the_limit(body: dict[str, Any], size: int) -> None:
    """Millions of entries would block the event loop for seconds, and run alone in any case."""
    assert body_size(body, 50) == size < body_size(body)


async def test_interactive_calls_let_the_loop_run_in_between() -> None:
    """The event loop runs between any two of many concurrent calls."""
    turns, order = BoundedExecutor(interactive=True), list[str]()

    async def ticking() -> None:
        for _ in range(3):
            order.append("tick")
            await asyncio.sleep(0)

    await asyncio.gather(*(turns.run(1, order.append, "turn") for _ in range(3)), ticking())
    assert [order.count("turn"), order.count("tick")] == [3, 3]
    assert "turn turn" not in " ".join(order)


async def test_a_body_rejected_in_a_thread_is_freed_at_once() -> None:
    """No garbage collection is needed: its frames are in no reference cycle."""

    class Body(dict[str, str]):
        """A body that can be watched."""

    def refuse(body: Body) -> None:
        raise ValueError(len(body))

    async def watched_body() -> weakref.ref[Body]:
        body = Body()
        with pytest.raises(ValueError, match="0"):
            await BoundedExecutor(short_bytes=-1).run(1, refuse, body)
        return weakref.ref(body)

    gc.disable()
    try:
        watched = await watched_body()
        await asyncio.sleep(0)
        assert watched() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "body",
    [{"a": [0] * 30_000}, {"a": dict.fromkeys(map(str, range(30_000)))}, {"a": [[]] * 30_000}],
)
def test_very_many_values_are_not_counted_one_by_one(body: dict[str, Any]) -> None:
    """Counting would block the event loop: such a body runs alone."""
    assert body_size(body, 2**30) == 2**30 + 1


async def test_an_executor_with_own_threads_uses_only_these() -> None:
    """Even short work runs outside the event loop, with a limited number of threads."""
    turns, both = BoundedExecutor(short_bytes=-1, num_threads=2), threading.Barrier(2)
    names = await asyncio.gather(*(turns.run(0, _name_behind, both) for _ in range(4)))
    assert len(set(names)) == 2
    assert threading.current_thread().name not in names


def _name_behind(both: threading.Barrier) -> str:
    both.wait(120)
    return threading.current_thread().name
