"""Stop strings match however the text is split into tokens."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.scripted_model import TURN_END, pretrained_tokenizer
from tidemill.engine.text.stop_strings import StopStrings
from tidemill.engine.text.tokenizer import Tokenizer
from tidemill.engine.text.vocabulary import vocabulary_of

TOKENIZER = Tokenizer(vocabulary_of(pretrained_tokenizer()))
TEXTS = st.text(alphabet="ab\n.é€😀", max_size=30)
STOPS = st.lists(st.text(alphabet="ab\n.é€😀", min_size=1, max_size=5), min_size=1, max_size=4)


def split_at(text: str, cuts: list[int]) -> list[int]:
    """Return tokens of the text, split at byte positions that a model might choose.

    Cuts can be inside characters: the bytes between two cuts are encoded separately.
    """
    data = text.encode()
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    ids: list[int] = []
    for start, end in itertools.pairwise(edges):
        piece = data[start:end]
        try:
            ids += TOKENIZER.encode(piece.decode(), add_special_tokens=False)
        except UnicodeDecodeError:
            ids += [id_of_byte(byte) for byte in piece]
    return ids


def id_of_byte(byte: int) -> int:
    """Return the token of one byte; the alphabet's tokens follow the special ones."""
    return next(i for i in range(300) if TOKENIZER.piece(i) == bytes([byte]))


def wanted(*stops: str, **options: Any) -> StopStrings:
    """Return the stop strings of a request."""
    return StopStrings(stops, TOKENIZER, **options)


def run(ids: list[int], stops: StopStrings) -> tuple[int, str | None]:
    """Push tokens until one completes a stop string; return how many and the stop string."""
    watch = stops.watch()
    for count, token_id in enumerate(ids, start=1):
        stop = watch.push(token_id)
        if stop is not None:
            return count, stop
    return len(ids), None


@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 200), max_size=12))
def test_the_text_before_the_first_stop_string_is_returned(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    """The match begins where the one that ends first would be found in the whole text.

    If one token completes several, the first to begin is used; nothing matches falsely.
    """
    ids = split_at(text, cuts)
    assert TOKENIZER.text(ids) == text
    ends = wanted(*stops)
    count, stop = run(ids, ends)
    if not any(other in text for other in stops):
        assert stop is None
        return
    assert stop is not None
    data = TOKENIZER.text_bytes(ids[:count])
    text_bytes = ends.kept(ids[:count], stop)
    assert ends.kept(ids[:count], stop, with_stop=True) == text_bytes + stop.encode()
    before_last_token = TOKENIZER.text_bytes(ids[: count - 1])
    assert not any(other.encode() in before_last_token for other in stops)
    starts = [at for other in stops if (at := data.find(other.encode())) >= 0]
    assert text_bytes == data[: min(starts)]


@given(text=TEXTS, stop=st.text(alphabet="ab.é€😀", min_size=1, max_size=4), data=st.data())
def test_one_stop_string_cuts_where_find_says(text: str, stop: str, data: st.DataObject) -> None:
    """With a single stop string the returned text is `text[:text.find(stop)]`."""
    ids = split_at(text, data.draw(st.lists(st.integers(0, 200), max_size=12)))
    ends = wanted(stop)
    count, matched = run(ids, ends)
    position = text.find(stop)
    if position < 0:
        assert matched is None
    else:
        assert matched == stop
        assert ends.kept(ids[:count], stop).decode() == text[:position]


def test_a_match_that_ends_too_early_does_not_count() -> None:
    """Before `min_tokens` a stop string is text, and it stays so afterwards."""
    ids = [id_of_byte(byte) for byte in b"ab.ab."]
    ends = wanted("b.", min_tokens=4)
    assert run(ids, ends) == (6, "b.")
    assert ends.kept(ids, "b.") == b"ab.a"


def test_a_match_that_ended_too_early_is_not_found_later() -> None:
    """It holds even if a longer stop string still needs those bytes."""
    ids = [id_of_byte(byte) for byte in b"ab.abab"]
    assert run(ids, wanted("b.", "zzzzzz", min_tokens=4)) == (7, None)


@pytest.mark.parametrize("stops", [["tal", "cap"], ["cap", "tal"]])
def test_the_first_of_two_matches_in_one_token_counts(stops: list[str]) -> None:
    """Their order in the request does not matter."""
    ids = TOKENIZER.encode(" capital", add_special_tokens=False)
    ends = wanted(*stops)
    assert (len(ids), run(ids, ends)) == (1, (1, "cap"))
    assert ends.kept(ids, "cap") == b" "
    assert ends.kept(ids, "cap", with_stop=True) == b" cap"


def test_a_match_may_end_at_the_minimum_number_of_tokens() -> None:
    """A sequence of exactly `min_tokens` tokens is long enough."""
    ids = [id_of_byte(byte) for byte in b"ab.ab."]
    assert run(ids, wanted("b.", min_tokens=3)) == (3, "b.")


def test_a_special_token_that_is_written_like_a_stop_string_stops() -> None:
    """Its text is skipped, so nothing is cut."""
    end = TOKENIZER.special_id(TURN_END)
    assert end is not None
    ids = [id_of_byte(97), end]
    assert run(ids, wanted(TURN_END)) == (2, TURN_END)
    assert wanted(TURN_END).kept(ids, TURN_END, with_stop=True) == b"a"
    assert run(ids, wanted(TURN_END, min_tokens=3)) == (2, None)


def test_other_special_tokens_are_not_text() -> None:
    """A stop string matches across skipped markup, as it does in the text."""
    end = TOKENIZER.special_id(TURN_END)
    assert end is not None
    ids = [id_of_byte(97), end, id_of_byte(98)]
    assert run(ids, wanted("ab")) == (3, "ab")
    assert run(ids, wanted("ab", skip_special_tokens=False)) == (3, None)


def test_a_stop_string_may_be_inside_shown_markup() -> None:
    """With `skip_special_tokens: false` special tokens are text like any other."""
    end = TOKENIZER.special_id(TURN_END)
    assert end is not None
    ends = wanted("im_end", skip_special_tokens=False)
    assert run([end], ends) == (1, "im_end")
    assert ends.kept([end], "im_end", with_stop=True) == b"<|im_end"


def test_one_value_serves_any_number_of_sequences() -> None:
    """The sequences are watched independently."""
    ends = wanted("ab")
    first, second = ends.watch(), ends.watch()
    assert [first.push(id_of_byte(97)), second.push(id_of_byte(98))] == [None, None]
    assert [first.push(id_of_byte(98)), second.push(id_of_byte(98))] == ["ab", None]
