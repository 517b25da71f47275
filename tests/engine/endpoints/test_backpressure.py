"""What is long has turns: how many bytes at once, in which order, and what becomes of the rest."""

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
    """Where texts are worked on once it is let; notes how many bytes it had in hand at most."""

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
        """Ask for a turn for each text."""
        return [asyncio.create_task(self.turns.run(len(text), self.work, text)) for text in texts]

    def work(self, text: str) -> str:
        """Wait for the word, then return the text."""
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


async def test_what_is_short_waits_for_nobody() -> None:
    """It runs at once in the loop's own thread, though the room is full and others wait."""
    desk = Desk()
    tasks = desk.start("a" * 90, "b" * 90)
    await settle(lambda: desk.now == 90)
    thread = await desk.turns.run(10, threading.get_ident)
    assert thread == threading.get_ident()
    assert desk.now == 90
    desk.go_on.set()
    await asyncio.gather(*tasks)


async def test_what_is_long_runs_in_another_thread() -> None:
    """The loop is free meanwhile."""
    assert await Desk().turns.run(11, threading.get_ident) != threading.get_ident()


async def test_long_ones_share_the_room() -> None:
    """Ten texts of 40 in a room of 100: two at a time, each with its own outcome."""
    desk = Desk()
    texts = [letter * 40 for letter in "abcdefghij"]
    tasks = desk.start(*texts)
    await settle(lambda: desk.now == 80)
    desk.go_on.set()
    assert await asyncio.gather(*tasks) == texts
    assert desk.most <= 100


async def test_one_above_the_bound_has_its_turn_alone() -> None:
    """It waits for those before it, and those behind it wait."""
    desk = Desk(is_open=True)
    texts = ["a" * 60, "b" * 1_000, "c" * 60]
    assert await asyncio.gather(*desk.start(*texts)) == texts
    assert (desk.most, desk.order) == (1_000, texts)


async def test_interactive_work_on_little_waits_for_no_work_on_much() -> None:
    """A body of an eighth of the room runs next to one that fills it, before those that wait."""
    desk = Desk(interactive=True)
    tasks = desk.start("a" * 90, *("b" * 90 for _ in range(5)), "c" * 12)
    await settle(lambda: len(desk.order) == 2)
    assert desk.order == ["a" * 90, "c" * 12]
    desk.go_on.set()
    await asyncio.gather(*tasks)


async def test_one_that_is_called_off_keeps_its_room_until_its_thread_is_done() -> None:
    """Nothing stops the thread; one that had not begun gives its turn to the next."""
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


async def test_one_that_is_called_off_as_its_turn_comes_gives_it_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its room is free again, though it never had a thread."""
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


async def test_one_that_is_called_off_lets_pass_who_waits_behind_it() -> None:
    """It waited for more room than there was; the next needs less."""
    desk = Desk()
    tasks = desk.start("a" * 60, "b" * 90, "c" * 20)
    await settle(lambda: desk.now == 60)
    tasks[1].cancel()
    async with asyncio.timeout(120):
        await settle(lambda: desk.now == 80)
    desk.go_on.set()
    assert await asyncio.gather(tasks[0], tasks[2]) == ["a" * 60, "c" * 20]


async def test_where_no_thread_can_be_started_the_room_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else everything long would wait for ever once threads can be had again."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    desk = Desk(is_open=True)
    with monkeypatch.context() as patch:
        patch.setattr(asyncio.get_running_loop(), "run_in_executor", refuse)
        with pytest.raises(RuntimeError, match="thread"):
            await desk.turns.run(90, desk.work, "a" * 90)
    async with asyncio.timeout(120):
        assert await desk.turns.run(90, desk.work, "b" * 90) == "b" * 90


async def test_one_that_fails_gives_its_room_back() -> None:
    """Its error is its own, and the next one runs."""
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
def test_a_body_is_as_large_as_what_is_to_be_read_of_it(body: dict[str, Any], size: int) -> None:
    """Text by its bytes, lists by their length, whatever lies inside what."""
    assert body_size(body) == size


@given(
    st.recursive(
        st.text(max_size=9) | st.integers() | st.none(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    )
)
def test_no_text_of_a_body_is_overlooked(value: Any) -> None:
    """Every text counts with its bytes at least."""

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
def test_what_is_above_the_bound_is_not_counted_to_its_end(body: dict[str, Any], size: int) -> None:
    """Millions of entries would hold the loop up for seconds, and are alone either way."""
    assert body_size(body, 50) == size < body_size(body)


async def test_those_that_alternate_let_others_come_between() -> None:
    """However many ask at once, between two of them the loop gets round."""
    turns, order = BoundedExecutor(interactive=True), list[str]()

    async def ticking() -> None:
        for _ in range(3):
            order.append("tick")
            await asyncio.sleep(0)

    await asyncio.gather(*(turns.run(1, order.append, "turn") for _ in range(3)), ticking())
    assert [order.count("turn"), order.count("tick")] == [3, 3]
    assert "turn turn" not in " ".join(order)


async def test_a_body_that_is_refused_in_a_thread_is_gone_at_once() -> None:
    """Nobody has to look for garbage first: its frames hold nothing that holds them."""

    class Body(dict[str, str]):
        """A body that can be watched."""

    def refuse(body: Body) -> None:
        raise ValueError(len(body))

    async def asked() -> weakref.ref[Body]:
        body = Body()
        with pytest.raises(ValueError, match="0"):
            await BoundedExecutor(short_bytes=-1).run(1, refuse, body)
        return weakref.ref(body)

    gc.disable()
    try:
        watched = await asked()
        await asyncio.sleep(0)
        assert watched() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "body",
    [{"a": [0] * 30_000}, {"a": dict.fromkeys(map(str, range(30_000)))}, {"a": [[]] * 30_000}],
)
def test_a_great_many_values_are_not_looked_at_one_by_one(body: dict[str, Any]) -> None:
    """That would hold the loop up: such a body has its turn alone."""
    assert body_size(body, 2**30) == 2**30 + 1


async def test_turns_with_threads_of_their_own_wait_for_nobody_elses() -> None:
    """However short they are, they run beside the loop, so many at a time."""
    turns, both = BoundedExecutor(short_bytes=-1, num_threads=2), threading.Barrier(2)
    names = await asyncio.gather(*(turns.run(0, _name_behind, both) for _ in range(4)))
    assert len(set(names)) == 2
    assert threading.current_thread().name not in names


def _name_behind(both: threading.Barrier) -> str:
    both.wait(120)
    return threading.current_thread().name
