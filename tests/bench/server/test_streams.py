"""The client of streams: its definition of a complete answer."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest

from bench.server.streams import MAX_TOKENS, Stream, _is_whole


def stream_of(counts: Iterable[int]) -> Stream:
    """Return a stream whose events report these numbers of tokens, cut anywhere."""
    events = [
        {"choices": [{"text": "a"}], "usage": {"completion_tokens": count}} for count in counts
    ]
    events.append({"choices": [], "usage": {"completion_tokens": MAX_TOKENS}})
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    head = "HTTP/1.1 200 OK\r\n\r\n"
    reads = [head, *(text[i : i + 50] for i in range(0, len(text), 50))]
    return Stream(1.0, [(1.5 + i, data.encode()) for i, data in enumerate(reads)])


@pytest.mark.parametrize(
    ("counts", "is_whole"),
    [
        (range(1, MAX_TOKENS + 1), True),
        ([2, MAX_TOKENS], True),
        ([1, 3, 2, MAX_TOKENS], False),
        ([1, 2], False),
        ([], False),
    ],
    ids=["all", "some tokens without text", "out of order", "cut off", "none"],
)
def test_an_answer_is_whole_when_its_tokens_grow_to_the_last(
    counts: Iterable[int], *, is_whole: bool
) -> None:
    """Tokens without text do not have separate events."""
    assert _is_whole(stream_of(counts).counts()) == is_whole


def test_the_first_token_is_the_first_event_and_not_the_head() -> None:
    """Servers send their head at other times."""
    stream = stream_of([1])
    assert (stream.first, stream.ended) == (1.5, stream.reads[-1][0])
