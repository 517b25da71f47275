"""The files of the benchmarks on real work."""

from __future__ import annotations

import json

import pytest

from bench.real import texts
from bench.real.accuracy import num_right
from bench.real.files import FILES, lines
from bench.real.messages import make_messages
from tidemill.protocol.requests import check_request

TEXTS = [
    "Return a list of all the names that the module exports to other modules.",
    "Read the file up to its end and return what was found there, or None.",
]


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_the_same_every_time_and_ends_by_itself(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Every line is a greedy request that an engine takes."""
    monkeypatch.setattr("bench.real.files.sample_texts", lambda count: TEXTS[:count])
    once = list(lines(name))
    assert once == list(lines(name))
    assert len({json.loads(line)["custom_id"] for line in once}) == len(once)
    for body in (json.loads(line)["body"] for line in once):
        check_request("/v1/chat/completions", body, ["smollm2"])
        assert body["temperature"] == 0
        assert "ignore_eos" not in body


def test_texts_are_sentences_rather_than_code_and_lists() -> None:
    """They come from docstrings and have 60 to 250 characters."""
    assert all(map(texts._is_prose, TEXTS))
    for other in (
        "Short.",
        "x" * 70 + ".",
        "Use `a[0] = {1: 2}` where the list is not empty at all.",
        TEXTS[0] * 4,
    ):
        assert not texts._is_prose(other)


def test_the_fields_of_a_message_are_in_it() -> None:
    """A reader can find all of them, and rows are correct whatever their capitals."""
    messages = make_messages(240)
    assert all(value in message.text for message in messages for value in message.fields.values())
    answers = [
        json.dumps(message.fields).upper().replace("NAME", "name") for message in messages[:2]
    ]
    answers.append("no JSON")
    rows = [
        {
            "custom_id": f"line-{number}",
            "response": {"body": {"choices": [{"message": {"content": text}}]}},
        }
        for number, text in enumerate(answers)
    ]
    assert num_right(rows, 60) == 2
