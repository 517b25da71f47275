"""The limit on a step's tokens falls at once, rises slowly, and stays in its range."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.engine.scheduling.step_budget import GROW_AFTER_STEPS, StepTokenLimit


def test_a_step_that_does_not_fit_is_followed_by_one_of_half_the_size() -> None:
    """It is half of the step's own size, which may be far below the limit."""
    bound = StepTokenLimit(2_048)
    bound.lower(2_048)
    assert bound.tokens == 1_024
    bound.lower(200)
    assert bound.tokens == 100
    for tokens in (50, 25, 12, 6, 3, 1, 1):
        bound.lower(bound.tokens)
        assert bound.tokens == tokens


def test_it_grows_only_after_several_steps_that_fitted() -> None:
    """A failure in between resets the count."""
    bound = StepTokenLimit(1_000)
    bound.lower(160)
    for _ in range(GROW_AFTER_STEPS - 1):
        bound.note_fit()
    assert bound.tokens == 80
    bound.note_fit()
    assert bound.tokens == 90
    for _ in range(GROW_AFTER_STEPS - 1):
        bound.note_fit()
    bound.lower(90)
    bound.note_fit()
    assert bound.tokens == 45


def test_it_returns_to_the_configured_limit_and_stays_there() -> None:
    """It also holds from the smallest step."""
    bound = StepTokenLimit(300)
    bound.lower(1)
    sizes = []
    for _ in range(60 * GROW_AFTER_STEPS):
        bound.note_fit()
        sizes.append(bound.tokens)
    assert sizes == sorted(sizes)
    assert sizes[-1] == 300


def test_failures_with_a_known_culprit_leave_no_trace() -> None:
    """The limit before the first of them is restored; earlier ones still count."""
    bound = StepTokenLimit(100)
    bound.lower(100)
    bound.note_fit()
    bound.lower(50)
    bound.lower(25)
    bound.restore()
    assert bound.tokens == 50
    bound.restore()
    assert bound.tokens == 50


@given(
    st.integers(1, 5_000),
    st.lists(st.sampled_from(["lower", "restore", "fit"]), max_size=60),
)
def test_it_never_leaves_its_range(most: int, events: list[str]) -> None:
    """It is at least one token, and at most the configured limit."""
    bound = StepTokenLimit(most)
    for event in events:
        if event == "lower":
            bound.lower(bound.tokens)
        elif event == "restore":
            bound.restore()
        else:
            for _ in range(GROW_AFTER_STEPS):
                bound.note_fit()
        assert 1 <= bound.tokens <= most
