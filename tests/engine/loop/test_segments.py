"""Cuts of a window's tokens, and the start of the next window."""

from __future__ import annotations

import pytest

from tidemill.engine.loop.recording import Cut, Piece, cut_window

ZERO = 100  # the id of time 0


def at(place: int) -> int:
    """Return the id of a time."""
    return ZERO + place


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        # No timestamps: all of it is one piece.
        ([1, 2, 3], Cut([Piece(0, 3, 0, 50)], 100)),
        ([], Cut([Piece(0, 0, 0, 50)], 100)),
        # A start alone does not determine the end.
        ([at(0), 1, 2], Cut([Piece(0, 3, 0, 50)], 100)),
        # One timestamp at the end: the piece and the window end there.
        ([at(0), 1, at(20)], Cut([Piece(0, 3, 0, 20)], 100)),
        # A pair, and the rest is cut: the next window begins there.
        ([at(0), 1, at(20), at(20), 2], Cut([Piece(0, 4, 0, 20)], 40)),
        # Two pairs: the second piece is complete.
        (
            [at(3), 1, at(20), at(22), 2, at(30), at(30), 3],
            Cut([Piece(0, 3, 3, 20), Piece(3, 7, 22, 30)], 60),
        ),
        # A pair, and a finished piece.
        (
            [at(0), 1, at(20), at(22), 2, at(30)],
            Cut([Piece(0, 3, 0, 20), Piece(3, 6, 22, 30)], 100),
        ),
    ],
)
def test_a_window_is_cut_at_its_pairs_of_times(tokens: list[int], expected: Cut) -> None:
    """The next window continues after the last of them."""
    assert cut_window(tokens, ZERO, 100) == expected


def test_without_times_a_window_is_one_piece() -> None:
    """Their ids are then not timestamps."""
    tokens = [at(0), 1, at(20), at(20), 2]
    assert cut_window(tokens, None, 100) == Cut([Piece(0, 5, 0, 50)], 100)


@pytest.mark.parametrize("place", [0, 50, 99])
def test_a_window_always_advances(place: int) -> None:
    """A pair at its very start, or after its end, consumes all of it."""
    assert cut_window([at(0), 1, at(place), at(place)], ZERO, 100).num_frames == 100
