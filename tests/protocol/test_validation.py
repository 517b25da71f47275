"""Error messages for invalid bodies."""

from __future__ import annotations

import pytest

from tidemill.protocol.chat import ChatCompletionRequest
from tidemill.protocol.errors import RequestError
from tidemill.protocol.validation import parse, printable, short_repr

MESSAGES = [{"role": "user", "content": "Hi"}]


def fault_of(**fields: object) -> RequestError:
    """Return the error that a chat body with these fields gets."""
    with pytest.raises(RequestError) as caught:
        parse(ChatCompletionRequest, {"messages": MESSAGES, **fields})
    return caught.value


def test_an_error_has_the_field_the_allowed_values_and_the_value() -> None:
    """One sentence is enough to correct the line."""
    error = fault_of(n=0)
    assert error.message == "`n` must be greater than or equal to 1; got 0."
    assert (error.param, error.status_code, error.type) == ("n", 400, "invalid_request_error")


def test_a_missing_field_is_reported() -> None:
    """The message does not contain the body."""
    with pytest.raises(RequestError, match=r"^`messages` is required\.$"):
        parse(ChatCompletionRequest, {})


def test_other_errors_are_listed_after_the_first() -> None:
    """A client can correct all of them at once."""
    error = fault_of(n=0, seed="x", top_p=7)
    assert error.param == "seed"
    assert error.message.endswith("(also invalid: n, top_p).")


def test_an_error_inside_a_list_has_a_dotted_path() -> None:
    """The path has positions and fields, and no internal type names."""
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": 5}]
    error = fault_of(messages=[*MESSAGES, {"role": "user", "content": content}])
    assert error.param == "messages.1.content.1.text"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "null"),
        (True, "true"),
        (False, "false"),
        (5, "5"),
        (1.5, "1.5"),
        (float("nan"), "nan"),
        ({"a": 1}, "an object"),
        ([[[]]], "a list"),
        ("a\ud800b", "'a\\ud800b'"),
        (2**200, "a very large integer"),
    ],
)
def test_a_value_is_shown_in_few_printable_characters(value: object, expected: str) -> None:
    """An error message can show any JSON value."""
    assert short_repr(value) == expected


def test_a_huge_integer_can_be_shown() -> None:
    """Python refuses to print integers of more than 4,300 digits; an error must not fail for it."""
    assert short_repr(10**5000) == "a very large integer"


def test_a_long_string_is_truncated() -> None:
    """A megabyte of text is not repeated in its own error."""
    assert len(short_repr("é" * 10**6)) < 100


def test_printable_text_is_utf8_of_bounded_length() -> None:
    """Lone surrogates are escaped, and the rest is unchanged."""
    assert printable("ü\udfff") == "ü\\udfff"
    assert printable("x" * 5_000, 10) == "x" * 10 + "…"
