"""Groups of all kinds of state in one model: storms of sequences, windows, chunks and snapshots."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.engine.scheduling.yard import END, PAGE, VOCABULARY, Yard, expected_tokens, long
from tidemill.engine.scheduling.admission import ArrivalOrder, PrefixOrder, UrgentFirst
from tidemill.engine.scheduling.sequence import SequenceRequest
from tidemill.engine.state import rows as rows_module
from tidemill.engine.state.groups import Pages
from tidemill.engine.state.rows import Rows

NUM_STORMS = 150


@pytest.fixture(autouse=True)
def fixture_short_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep snapshots of prefixes of one page."""
    monkeypatch.setattr(rows_module, "FEWEST_TOKENS", PAGE)


def random_kinds(rng: random.Random, max_num_seqs: int) -> dict[str, int]:
    """Return the kinds of state that a model has in addition to full pages, at least one."""
    kinds: dict[str, int] = {}
    if rng.random() < 0.6:
        kinds["window"] = rng.randint(1, 12)
    if rng.random() < 0.4:
        kinds["chunk"] = rng.randint(3, 16)
    if rng.random() < 0.5 or not kinds:
        kinds["num_rows"] = rng.randint(1, max_num_seqs + 2)
    return kinds


def storm(seed: int) -> None:
    """Run random sequences with few pages and rows; each has the tokens it would have alone."""
    rng = random.Random(seed)
    max_num_seqs, budget = rng.randint(1, 5), rng.randint(5, 24)
    kinds = random_kinds(rng, max_num_seqs)
    common = [rng.randrange(VOCABULARY) for _ in range(30)]
    requests = []
    for _ in range(rng.randint(1, 9)):
        own = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 9))]
        prompt = common[: rng.randint(0, 30)] + own if rng.random() < 0.7 else own
        requests.append(
            SequenceRequest(
                prompt,
                rng.randint(0, 12),
                cache_salt=rng.choice(["", "", "", "other"]),
                priority=1 if rng.random() < 0.2 else None,
            )
        )
    most = max(len(one.prompt_ids) + one.max_tokens for one in requests)
    per_page = 1 + ("window" in kinds) + ("chunk" in kinds)
    yard = Yard(
        num_pages=per_page * -(-most // PAGE) + rng.randint(0, 12),
        max_num_seqs=max_num_seqs,
        budget=max(budget, max_num_seqs),
        end=END,
        admission=UrgentFirst(rng.choice([ArrivalOrder, PrefixOrder])()),
        steps_ahead=rng.randint(0, 1),
        kinds=kinds,
        fewest_copied=rng.randint(0, 2),
    )
    assert yard.scheduler.can_ever_fit(most)
    dropped = set()
    for request in requests:
        for _ in range(rng.randint(0, 3)):
            if yard.is_busy:
                yard.step()
        sequence = yard.add_request(request)
        if rng.random() < 0.1:
            dropped.add(sequence)
    for sequence in dropped:
        yard.scheduler.drop({sequence})
    yard.run_all()
    for sequence in yard.finished:
        if sequence not in dropped:
            assert sequence.generated == expected_tokens(sequence.request, 64, END)
    assert len({*yard.finished} | dropped) == len(requests)
    yard.check_empty()


def storms() -> None:
    """Run as many storms as the suite has time for."""
    for seed in range(NUM_STORMS):
        storm(seed)


def test_storms_do_not_change_any_sequence() -> None:
    """Sequences are preempted, resumed and cut at borders, with few pages and rows."""
    storms()


def keep_its_row(_: Rows, slot: int, start: int) -> bool:
    """Write a snapshot that other sequences resume from."""
    del slot, start
    return False


def name_immediately(self: Rows, slot: int, start: int, stop: int, num_settled: int) -> int:
    """Name a state before any step has left it."""
    reached = ATTEND(self, slot, start, stop, num_settled)
    if reached == self.borders[slot]:
        self.settle(np.array([slot]), np.array([reached]))
    return reached


def start_from_own_row(self: Rows, slots: Any, starts: Any) -> Any:
    """Read the sequence's own row instead of the snapshot."""
    return np.where(starts == 0, -1, self.rows[slots])


def release_too_early(self: Pages, slots: Any, num_settled: Any) -> None:
    """Release a page that the next token still sees."""
    RELEASE(self, slots, num_settled + self._size)


ATTEND, RELEASE = Rows.attend, Pages._release_unseen


@pytest.mark.parametrize(
    ("kind", "name", "broken"),
    [
        (Rows, "_must_move", keep_its_row),
        (Rows, "attend", name_immediately),
        (Rows, "sources_of", start_from_own_row),
        (Pages, "_release_unseen", release_too_early),
    ],
)
def test_a_lost_or_stale_state_is_detected(
    kind: type, name: str, broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of the storms detects an engine that loses a state."""
    monkeypatch.setattr(kind, name, broken)
    with pytest.raises((AssertionError, KeyError)):
        storms()


def test_a_shared_prefix_is_computed_once() -> None:
    """The first sequence leaves a snapshot, and the others wait for it."""
    yard = Yard(num_pages=200, max_num_seqs=8, budget=64, kinds={"num_rows": 9})
    common = long(24, 1)
    sequences = [yard.add([*common, *long(3, seed)], 2) for seed in range(2, 8)]
    yard.run_all()
    assert [one.num_cached_tokens for one in sequences] == [0, *[24] * 5]


def test_the_second_request_of_a_prefix_leaves_a_snapshot() -> None:
    """The second request computes the prefix again and leaves a snapshot; the third one resumes."""
    yard = Yard(num_pages=200, kinds={"num_rows": 5})
    sequences = []
    for seed in range(3):
        sequences.append(yard.add([*long(24, 1), *long(3, seed + 5)], 2))
        yard.run_all()
    assert [one.num_cached_tokens for one in sequences] == [0, 0, 24]


def test_a_window_group_holds_only_the_pages_in_its_window() -> None:
    """The number of pages depends only on the window and its alignment, not on the length."""
    yard = Yard(num_pages=64, max_model_len=160, budget=8, kinds={"window": 8})
    yard.add(long(60), 90)
    (windowed,) = yard.groups
    assert isinstance(windowed, Pages)
    while yard.is_busy:
        yard.step()
        assert (windowed.num_pages - windowed.first_live).max() <= (8 + 8) // PAGE + 2
    yard.check_empty()
