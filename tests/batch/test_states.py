"""The status transitions of a batch: forward only, and none from a final status."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.batch.errors import InvalidMove
from tidemill.batch.model import Batch, Options, Source
from tidemill.batch.object_keys import outputs_of_drop
from tidemill.batch.states import MOVES, RANK, TERMINAL, Status, check_move, sources_of

OUTPUTS = outputs_of_drop("input/x.jsonl")
assert OUTPUTS is not None
NEW = Batch(
    "batch_1", "t", Source("b", "input/x.jsonl", "e", 1), "f", Options(), OUTPUTS, 0, 86_400
)


@given(st.lists(st.sampled_from(Status)))
def test_no_sequence_of_events_moves_a_status_backwards(events: list[Status]) -> None:
    """For any order of events, ranks only increase, and a final status stays."""
    batch = NEW
    for now, event in enumerate(events, start=1):
        before = batch
        with suppress(InvalidMove):
            batch = batch.moved(event, now)
        if batch is not before:
            assert not before.is_terminal
            assert RANK[batch.status] > RANK[before.status]
            assert getattr(batch, f"{batch.status}_at") == now


@given(st.lists(st.sampled_from(Status), max_size=12))
def test_the_times_of_a_batch_are_in_order(events: list[Status]) -> None:
    """A time is set once, by its transition, and only for a status that was reached."""
    batch, passed = NEW, [Status.VALIDATING]
    for now, event in enumerate(events, start=1):
        with suppress(InvalidMove):
            batch = batch.moved(event, now)
            passed.append(event)
    times = [getattr(batch, f"{status}_at") for status in passed[1:]]
    assert times == sorted(times)
    unseen = set(Status) - set(passed) - {Status.VALIDATING}
    assert all(getattr(batch, f"{status}_at") is None for status in unseen)


@pytest.mark.parametrize("status", Status)
def test_every_status_leads_to_a_final_one(status: Status) -> None:
    """Every status can reach a final one, and final ones lead nowhere."""
    assert (status in TERMINAL) == (not MOVES[status])
    reached, frontier = set(), {status}
    while frontier:
        reached |= frontier
        frontier = {target for source in frontier for target in MOVES[source]} - reached
    assert reached & TERMINAL


def test_statuses_and_transitions_are_openais() -> None:
    """The design adds one transition, explained in an ADR."""
    named = {
        "validating": {"in_progress", "failed", "expired", "cancelling"},
        "in_progress": {"finalizing", "expired", "cancelling"},
        "finalizing": {"completed", "expired", "failed"},
        "cancelling": {"cancelled"},
    }
    moves = {str(source): set(map(str, targets)) for source, targets in MOVES.items() if targets}
    assert moves == named
    assert sources_of(Status.CANCELLED) == (Status.CANCELLING,)


def test_a_refused_transition_has_both_statuses() -> None:
    """Log lines then show the attempt."""
    with pytest.raises(InvalidMove, match="completed cannot become failed"):
        check_move(Status.COMPLETED, Status.FAILED)
