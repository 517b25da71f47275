"""Constraints on tokens: the next allowed tokens, as bits."""

from __future__ import annotations

import numpy as np
import pytest

from tidemill.engine.scheduling.sequence import Constraint, ConstraintState
from tidemill.engine.structured_output.token_constraints import AllOf, AllowedTokens, BadWords

VOCABULARY = 70
WORDS = -(-VOCABULARY // 32)


def allowed(watch: ConstraintState) -> set[int] | None:
    """Return the tokens that are allowed next; None if any are."""
    mask = np.full(WORDS, 0xA5A5A5A5, np.uint32)
    if not watch.fill(mask):
        assert (mask == 0xA5A5A5A5).all()
        return None
    return {i for i in range(VOCABULARY) if mask[i // 32] >> np.uint32(i % 32) & np.uint32(1)}


def after(constraint: Constraint, *token_ids: int) -> set[int] | None:
    """Return the allowed tokens after some tokens."""
    watch = constraint.start_state()
    for token_id in token_ids:
        assert not watch.push(token_id)
    return allowed(watch)


def all_except(*token_ids: int) -> set[int]:
    """Return the vocabulary without some tokens."""
    return set(range(VOCABULARY)) - {*token_ids}


def test_only_allowed_tokens_are_generated() -> None:
    """It holds at the beginning and later, in every word of the mask."""
    constraint = AllowedTokens(frozenset({0, 31, 32, 69}))
    assert after(constraint) == after(constraint, 31, 0) == {0, 31, 32, 69}


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ((), all_except(5)),
        ((1,), all_except(5)),
        ((1, 2), all_except(5, 3, 33)),
        ((9, 1, 2), all_except(5, 3, 33)),
        ((2,), all_except(5)),
        ((1, 2, 2), all_except(5, 4)),
    ],
)
def test_the_last_token_of_a_bad_word_is_masked(
    tokens: tuple[int, ...], expected: set[int]
) -> None:
    """It is masked once all tokens before it were generated; a word of one token always is."""
    words = BadWords(frozenset({(5,), (1, 2, 3), (1, 2, 33), (2, 2, 4), (9, 2, 4), (0, 2, 4)}))
    assert after(words, *tokens) == expected


def test_the_mask_is_unchanged_when_no_bad_word_is_near() -> None:
    """The mask then has all bits set as before."""
    assert after(BadWords(frozenset({(1, 2)}))) is None
    assert after(BadWords(frozenset({(1, 2)})), 1) == all_except(2)
    assert after(BadWords(frozenset({(1, 2)})), 1, 7) is None


def test_several_constraints_allow_their_intersection() -> None:
    """A constraint without effect changes nothing, and each sees every token."""
    both = AllOf((AllowedTokens(frozenset({1, 2, 3})), BadWords(frozenset({(1, 2)}))))
    assert after(both) == {1, 2, 3}
    assert after(both, 1) == {1, 3}
    turned = AllOf((BadWords(frozenset({(1, 2)})), AllowedTokens(frozenset({1, 2, 3}))))
    assert after(turned) == {1, 2, 3}
    assert after(turned, 1) == {1, 3}
    assert after(AllOf((BadWords(frozenset({(1, 2)})),))) is None


def test_the_first_constraint_wins_if_nothing_is_allowed() -> None:
    """A required form is produced even if it contains a bad word."""
    assert after(AllOf((AllowedTokens(frozenset({4})), BadWords(frozenset({(4,)}))))) == {4}


def test_equal_constraints_compare_equal() -> None:
    """Requests with equal constraints can be computed once."""
    one, two = (
        AllOf((AllowedTokens(frozenset({1, 2})), BadWords(frozenset({(1, 2)})))) for _ in range(2)
    )
    assert one == two
    assert hash(one) == hash(two)
