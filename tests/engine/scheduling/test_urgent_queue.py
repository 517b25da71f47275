"""Queue of interactive items that wait."""

from __future__ import annotations

import random

import pytest

from tests.engine.scheduling.counted_priority import CountedPriority
from tidemill.engine.scheduling.admission import UrgentQueue


def test_items_leave_by_priority_and_then_in_the_order_of_arrival() -> None:
    """One that returns is the first of its priority; dropped ones leave nothing behind."""
    queue: UrgentQueue[str] = UrgentQueue()
    for priority, item in [(1, "a"), (0, "b"), (1, "c"), (-2, "d"), (0, "e"), (5, "f")]:
        queue.append(priority, item)
    queue.appendleft(1, "g")
    expected = ["d", "b", "e", "g", "a", "c", "f"]
    assert (len(queue), list(queue)) == (7, expected)
    queue.remove({"d", "a", "unknown"})
    queue.append(-2, "h")
    assert [queue.popleft() for _ in range(len(queue))] == ["h", "b", "e", "g", "c", "f"]
    assert not queue
    assert list(queue) == []
    with pytest.raises(IndexError):
        queue.popleft()


@pytest.mark.parametrize("num_priorities", [2, 1000])
def test_an_item_costs_few_comparisons_however_many_wait(num_priorities: int) -> None:
    """The cost grows with the logarithm of the number of priorities, not with the queue."""
    queue: UrgentQueue[int] = UrgentQueue()
    numbers = [number % num_priorities for number in range(1000)]
    random.Random(0).shuffle(numbers)
    with CountedPriority.counting() as count:
        for number in numbers:
            queue.append(CountedPriority(number), number)
        assert [queue.popleft() for _ in numbers] == sorted(numbers)
    assert count() < 25 * len(numbers)
