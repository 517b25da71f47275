"""The `stream` of a body: true, false or invalid."""

from __future__ import annotations

import pytest

from tidemill.protocol.errors import RequestError
from tidemill.protocol.stream import is_stream, refuse_stream


@pytest.mark.parametrize("value", [True, "True", "true", "YES", "on", 1, "1"])
def test_any_word_for_true_requests_a_stream(value: object) -> None:
    """It is refused with the message that clients expect."""
    assert is_stream({"stream": value})
    with pytest.raises(RequestError, match="must not be sent in stream mode") as caught:
        refuse_stream({"stream": value})
    assert (caught.value.param, caught.value.code) == ("stream", "stream_not_supported")


@pytest.mark.parametrize(
    "body", [{}, *({"stream": value} for value in (None, False, "False", "no", 0))]
)
def test_false_or_nothing_requests_no_stream(body: dict[str, object]) -> None:
    """Clients write out the default."""
    assert not is_stream(body)
    refuse_stream(body)


@pytest.mark.parametrize(
    "value", ["maybe", 2, -1, pytest.param(10**5_000, id="huge"), 0.0, 1.0, [], {}, [True]]
)
def test_an_invalid_stream_is_refused_by_name(value: object) -> None:
    """It requests no stream, but is not a boolean either."""
    assert not is_stream({"stream": value})
    with pytest.raises(RequestError, match="`stream` must be false") as caught:
        refuse_stream({"stream": value})
    assert caught.value.code == "invalid_request"
