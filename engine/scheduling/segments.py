"""A window's tokens, cut where the model says that something ends: Whisper's sequential algorithm.

What comes behind the last pair of times is cut off in the middle, perhaps of a word: it is not kept
and the next window begins there, so that nothing is cut or said twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# A place of a window is so many frames, and each time is one of a place.
FRAMES_A_PLACE = 2


class Piece(NamedTuple):
    """Tokens `start:stop` of a window, said from place `begins` to place `ends` of it."""

    start: int
    stop: int
    begins: int
    ends: int


class Cut(NamedTuple):
    """The pieces of a window, and how many frames of it they are about."""

    pieces: list[Piece]
    num_frames: int


def cut_window(token_ids: Sequence[int], first_timestamp: int | None, num_frames: int) -> Cut:
    """Cut what was written of a window of `num_frames`; without times it is one piece.

    `token_ids` are without prompt and end. At least one frame is gone through.
    """
    whole = Piece(0, len(token_ids), 0, num_frames // FRAMES_A_PLACE)
    if first_timestamp is None:
        return Cut([whole], num_frames)
    places = [token - first_timestamp for token in token_ids]  # negative where it is text
    stops = [i + 1 for i in range(len(places) - 1) if places[i] >= 0 and places[i + 1] >= 0]
    if not stops:
        last = next((place for place in reversed(places) if place >= 0), 0)
        return Cut([whole._replace(ends=last or whole.ends)], num_frames)
    # A single time at the end says that nothing follows it.
    is_over = len(places) > 1 and places[-2] < 0 <= places[-1]
    if is_over:
        stops.append(len(places))
    else:
        stops[-1] += 1  # the pair's second, too, is the last piece's
    starts = [0, *stops[:-1]]
    last_end = places[-1] if is_over else places[stops[-1] - 2]
    ends = [*(places[stop - 1] for stop in stops[:-1]), last_end]
    pieces = [
        Piece(start, stop, max(places[start], 0), end)
        for start, stop, end in zip(starts, stops, ends, strict=True)
    ]
    passed = last_end * FRAMES_A_PLACE
    return Cut(pieces, passed if 0 < passed < num_frames and not is_over else num_frames)
