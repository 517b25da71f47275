"""Order of lines, and the search for lines that kill the engine."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.batch.file.lines import RawLine
from tidemill.batch.suspects import Verdict, halves
from tidemill.handler.worker.shard.pending_lines import PendingLines


def raws(*numbers: int) -> list[RawLine]:
    """Return lines with these numbers."""
    return [RawLine(number, b"{}") for number in numbers]


def take(pending: PendingLines) -> RawLine | None:
    """Return the next line of the only engine: suspects have it for themselves."""
    return pending.pop_suspect() if pending.has_suspects else pending.pop()


def take_all(pending: PendingLines) -> list[int]:
    """Return the lines that may be handed out now."""
    taken = []
    while (line := take(pending)) is not None:
        taken.append(line.number)
    return taken


def judged(pending: PendingLines) -> Verdict:
    """Return the verdict after the death of the only engine, which is also what it leaves."""
    inflight = {*pending._inflight, *pending._suspects._running}
    verdict = pending.judge(inflight)
    quarantined = tuple(line.number for line in pending.take_back(inflight))
    assert verdict == Verdict(pending.suspects, quarantined)
    assert pending.num_inflight == 0
    return verdict


def test_without_suspects_all_lines_may_run_at_once() -> None:
    """Each is handed out once, in order."""
    pending = PendingLines(raws(1, 2, 3))
    assert pending.num_waiting == 3
    assert not pending.has_suspects
    assert take_all(pending) == [1, 2, 3]
    assert (pending.num_waiting, pending.num_inflight) == (0, 3)
    for number in (1, 2, 3):
        assert not pending.is_finished
        pending.finish(number)
    assert pending.is_finished


def test_suspects_run_first_and_a_group_at_a_time() -> None:
    """The next group waits until the former is finished, all others until the last group is."""
    pending = PendingLines(raws(1, 2, 3, 4, 5), [(2, 3), (5,)])
    stages = []
    while not pending.is_finished:
        is_exclusive = pending.has_suspects
        stages.append((take_all(pending), is_exclusive))
        for number in stages[-1][0]:
            pending.finish(number)
    assert stages == [([2, 3], True), ([5], True), ([1, 4], False)]


def test_ranks_are_the_order_of_lines_that_are_not_suspects() -> None:
    """The rank of the next line decides the turn."""
    pending = PendingLines(raws(1, 2, 3, 4), [(4, 3)], [(0, 7), (0, 2), (0, 9), (0, 1)])
    assert take_all(pending) == [4, 3]
    for number in (3, 4):
        pending.finish(number)
    assert pending.next_rank == (0, 2)
    assert take_all(pending) == [2, 1]


def test_suspects_that_have_a_row_by_now_are_cleared() -> None:
    """A group is what is left of it; one of which nothing is left does not count."""
    pending = PendingLines(raws(1, 3), [(2, 3), (4,)])
    assert pending.suspects == ((3,),)


def test_a_first_death_makes_suspects_of_what_was_in_flight() -> None:
    """Finished and waiting lines are not suspects; a single line is only a suspect, too."""
    pending = PendingLines(raws(1, 2, 3, 4))
    for _ in range(3):
        pending.pop()
    pending.finish(2)
    assert judged(pending) == Verdict(((1, 3),))
    alone = PendingLines(raws(1))
    alone.pop()
    assert judged(alone) == Verdict(((1,),))


def test_a_group_in_which_the_engine_dies_is_halved() -> None:
    """Finished lines are cleared, and waiting groups go on waiting."""
    pending = PendingLines(raws(*range(1, 9)), [(1, 2, 3, 4, 5), (7, 8)])
    take_all(pending)
    pending.finish(2)
    assert judged(pending) == Verdict(((1, 3), (4, 5), (7, 8)))


def test_the_last_of_a_group_is_alone_once_more_before_it_is_judged() -> None:
    """The engine may have died of what another one had done to it."""
    pending = PendingLines(raws(1, 2), [(1, 2)])
    take_all(pending)
    pending.finish(1)
    assert judged(pending) == Verdict(((2,),))


def test_a_line_that_was_alone_is_quarantined() -> None:
    """Having been a suspect before; the other groups stay what they are."""
    pending = PendingLines(raws(1, 2, 3), [(2,), (1, 3)])
    take_all(pending)
    assert judged(pending) == Verdict(((1, 3),), (2,))


def test_a_death_without_a_line_of_the_shard_changes_nothing() -> None:
    """It does not matter whether its suspects wait or were cleared."""
    assert judged(PendingLines(raws(1, 2), [(2,)])) == Verdict(((2,),))
    cleared = PendingLines(raws(1, 2), [(2,)])
    take_all(cleared)
    cleared.finish(2)
    assert judged(cleared) == Verdict(())


def test_the_death_of_one_engine_leaves_what_another_has() -> None:
    """Suspects in the other engine continue, and waiting lines are not suspects."""
    pending = PendingLines(raws(*range(1, 9)), [(1, 2)])
    assert [line.number for line in (pending.pop_suspect(), pending.pop(), pending.pop()) if line]
    assert pending.judge({3, 4}) == Verdict(((1, 2), (3, 4)))
    assert pending.take_back({3, 4}) == ()
    assert (pending.suspects, pending.num_inflight) == (((1, 2), (3, 4)), 1)
    pending.finish(1)
    while (line := pending.pop_suspect()) is not None:
        pending.finish(line.number)
    assert (pending.is_on_trial, pending.suspects) == (False, ())
    rest = take_all(pending)
    assert rest == [5, 6, 7, 8]


def test_suspects_are_halved_while_other_lines_run() -> None:
    """Down to the one that is quarantined, which leaves the others their turns."""
    pending = PendingLines(raws(*range(1, 7)), [(1, 2, 3)])
    quarantined = []
    assert pending.pop() is not None
    while pending.has_suspects:
        group = []
        while (line := pending.pop_suspect()) is not None:
            group.append(line.number)
        if 2 in group:
            quarantined += [line.number for line in pending.take_back(group)]
        else:
            for number in group:
                pending.finish(number)
    assert quarantined == [2]
    assert (pending.num_inflight, take_all(pending)) == (1, [5, 6])


@given(st.lists(st.integers(), unique=True))
def test_halves_are_a_partition(lines: list[int]) -> None:
    """Nothing is lost, no group is empty and none is larger than half, rounded up."""
    groups = halves(lines)
    assert [line for group in groups for line in group] == lines
    assert all(0 < len(group) <= -(-len(lines) // 2) for group in groups)


@given(st.integers(1, 40), st.sets(st.integers(1, 40)), st.integers(1, 12), st.randoms())
def test_exactly_the_deadly_lines_end_in_quarantine(
    num_lines: int, deadly: set[int], max_inflight: int, random: object
) -> None:
    """Each line ends once, whatever is in flight together and in whatever order lines finish."""
    shuffle = random.shuffle  # type: ignore[attr-defined]
    deadly = {line for line in deadly if line <= num_lines}
    rows: set[int] = set()
    verdict = Verdict(())
    quarantined: set[int] = set()
    num_deaths = 0
    while len(rows) + len(quarantined) < num_lines:
        left = [n for n in range(1, num_lines + 1) if n not in rows | quarantined]
        pending = PendingLines(raws(*left), verdict.suspects)
        inflight: list[int] = []
        while not pending.is_finished:
            while len(inflight) < max_inflight and (line := take(pending)) is not None:
                inflight.append(line.number)
            shuffle(inflight)
            if inflight[-1] in deadly:
                verdict = judged(pending)
                quarantined.update(verdict.quarantined)
                num_deaths += 1
                break
            rows.add(inflight[-1])
            pending.finish(inflight.pop())
    assert quarantined == deadly
    assert rows == set(range(1, num_lines + 1)) - deadly
    assert num_deaths <= len(deadly) * (2 * max_inflight.bit_length() + 2)
