"""Orders of files: prompts that begin alike together, long outputs first."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.offline.plan import line_index, order
from tidemill.offline.plan.line_index import MAX_KEY_BYTES, LineIndex, describe
from tidemill.offline.plan.order import PrefixTree
from tidemill.offline.plan.plan import Plan


@contextmanager
def index_of(bodies: Sequence[dict[str, Any] | None]) -> Iterator[LineIndex]:
    """Yield the index of a file with these bodies."""
    with closing(LineIndex()) as index:
        for number, body in enumerate(bodies, start=1):
            index.add(100 * number, 99, number, body)
        yield index


def test_prompts_with_the_same_instructions_share_a_prefix() -> None:
    """A response's instructions are rendered before its input."""
    bodies = [{"input": text, "instructions": rules} for text in "ab" for rules in "xy"]
    keys = [describe(body)[0] for body in bodies]
    assert sorted(keys) == [keys[0], keys[2], keys[1], keys[3]]


def chat(text: str, max_tokens: int | None = 64, **more: Any) -> dict[str, Any]:
    """Return the body of a chat."""
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "temperature": 0}
    return body | ({} if max_tokens is None else {"max_tokens": max_tokens}) | more


def places_of(bodies: Sequence[dict[str, Any] | None]) -> list[int]:
    """Return the planned order of a file."""
    with index_of(bodies) as index:
        return [*Plan(index, lambda _: False)]


texts = st.lists(st.text("ab", max_size=3).map(lambda text: text * 60), max_size=4).map("".join)


@settings(max_examples=200)
@given(st.lists(texts, max_size=30), st.integers(1, 400))
def test_a_tree_is_that_of_the_bytes_of_its_prompts(prompts: list[str], window: int) -> None:
    """Sorted, with what each shares with the one before, whatever is compared at a time."""
    bodies = [chat(text) for text in prompts]
    with index_of(bodies) as index, pytest.MonkeyPatch.context() as patched:
        patched.setattr(order, "_WINDOW_BYTES", window)
        patched.setattr(order, "_MAX_PASSES", 10**6)
        patched.setattr(line_index, "_BLOCK_BYTES", window)
        tree = PrefixTree.from_index(index, np.arange(len(bodies)))
    keys = [describe(bodies[place])[0] for place in tree.places]
    assert sorted(tree.places.tolist()) == [*range(len(bodies))]
    for before, after, shared in zip(keys, keys[1:], tree.shared[1:].tolist(), strict=False):
        common = next(
            (at for at, (a, b) in enumerate(zip(before, after, strict=False)) if a != b),
            min(len(before), len(after)),
        )
        # Fingerprints order what shares less than the first of them.
        assert shared == common or (common < 128 and shared == 0)
    groups = [key[:128] for key in keys]
    for group in set(groups):
        inside = [key for key in keys if key[:128] == group]
        assert inside == sorted(inside)
        assert keys.index(inside[0]) + len(inside) == len(keys) - keys[::-1].index(inside[-1])


def test_lines_of_a_document_run_together_the_longest_answers_first() -> None:
    """Documents by the longest answer among them, the questions of each likewise."""
    documents = [f"{number} " + "x" * 600 for number in range(3)]
    lengths = {(0, 0): 8, (0, 1): 16, (1, 0): 8, (1, 1): 512, (2, 0): 64, (2, 1): 128}
    expected = [*lengths]
    random.Random(3).shuffle(expected)
    bodies = [chat(f"{documents[d]}\n{q}", lengths[d, q]) for d, q in expected]
    assert [expected[place] for place in places_of(bodies)] == [
        (1, 1), (1, 0), (2, 1), (2, 0), (0, 1), (0, 0)
    ]  # fmt: skip


def test_what_shares_nothing_stays_in_the_order_of_the_file() -> None:
    """Rows are then written as they finish; some lines are not requests."""
    bodies: list[dict[str, Any] | None] = [chat(f"{n * 7919 % 101} is this") for n in range(300)]
    assert places_of(bodies) == [*range(300)]
    assert sorted(places_of([None, *bodies, None])) == [*range(302)]
    assert places_of([]) == []


def test_equal_lines_are_neighbours() -> None:
    """However far apart they stand, so that they are computed once."""
    bodies = [chat("y" * 300 + str(n % 50)) for n in range(200)]
    found = [place % 50 for place in places_of(bodies)]
    assert found == [text for text in dict.fromkeys(found) for _ in range(4)]


def test_only_what_must_repeat_is_a_repeat() -> None:
    """Greedy or seeded bodies of the same parameters."""
    bodies = [
        chat("a"),
        chat("a"),
        chat("a", 65),
        chat("a", temperature=1),
        chat("a", temperature=1),
    ]
    bodies += [chat("a", temperature=1, seed=1)] * 2
    with index_of(bodies) as index:
        assert Plan(index, lambda _: False).is_repeat.tolist() == [
            False, True, False, False, False, False, True
        ]  # fmt: skip


def test_lines_that_have_a_row_are_left_out() -> None:
    """Each other one comes once, though lengths turn out others on the way."""
    bodies = [chat("z" * 300 + str(n), 4096) for n in range(1_000)]
    with index_of(bodies) as index:
        plan, seen = Plan(index, lambda place: place % 3 == 0), list[int]()
        for place in plan:
            seen.append(place)
            plan.finish([place], [10 + place])
    assert sorted(seen) == [place for place in range(1_000) if place % 3]


def test_what_is_learned_of_a_group_moves_its_lines() -> None:
    """Answers of one kind turn out long: what is left of it comes first."""
    bodies = [chat("short " + "s" * 300 + str(n), 4096) for n in range(500)]
    bodies += [chat("long " + "l" * 300 + str(n), 4096) for n in range(500)]
    random.Random(1).shuffle(bodies)
    is_long = ["long" in body["messages"][0]["content"] for body in bodies]
    with index_of(bodies) as index:
        plan, seen = Plan(index, lambda _: False), list[bool]()
        for place in plan:
            seen.append(is_long[place])
            plan.finish([place], [2_000 if is_long[place] else 20])
    last = "".join("ls"[not one] for one in seen[len(seen) // 2 :])
    assert last == "l" * last.count("l") + "s" * last.count("s")


@pytest.mark.parametrize(
    "texts",
    [
        [f"{n} and more" for n in range(20_000)],
        ["w" * 2 * MAX_KEY_BYTES] * 2_000,
        ["w" * 9_000 + str(n) for n in range(2_000)],
        ["w" * (n % 200) for n in range(20_000)],
    ],
    ids=["all different", "all equal", "all but the end equal", "each the beginning of another"],
)
def test_no_file_takes_more_passes_than_lines(texts: list[str]) -> None:
    """The work of an order is bounded whatever the prompts are; none is left out."""
    num_read = 0

    class Counting(LineIndex):
        def keys(self, offsets: Any, lengths: Any) -> Any:
            nonlocal num_read
            num_read += len(offsets)
            return super().keys(offsets, lengths)

    with closing(Counting()) as index:
        for number, text in enumerate(texts):
            index.add(0, 0, number, chat(text))
        assert len(set(Plan(index, lambda _: False))) == len(texts)
    assert num_read <= (order._MAX_PASSES + 1) * len(texts)
