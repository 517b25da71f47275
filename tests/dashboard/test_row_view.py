"""Rows as the page shows them: every kind of answer, and hostile bytes."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from tidemill.dashboard.render import render
from tidemill.dashboard.row_facts import facts_of
from tidemill.dashboard.row_query import BadQuery, RowQuery
from tidemill.dashboard.row_view import Field, Part, Share, row_view
from tidemill.dashboard.rows_page import RowLinks


def row_of(body: Any, status: int = 200, **changes: Any) -> bytes:
    """Return a row with an answer."""
    response = {"status_code": status, "request_id": "r", "body": body}
    return json.dumps({"custom_id": "a", "response": response, "error": None} | changes).encode()


def chat(content: Any, **choice: Any) -> dict[str, Any]:
    """Return the body of a chat with one answer."""
    message = {"role": "assistant", "content": content}
    usage = {"completion_tokens": 7}
    return {"choices": [{"index": 0, "message": message, **choice}], "usage": usage}


SHARES = [{"value": "no", "probability": 0.25}, {"value": "yes", "probability": 0.75}]
SURE = {"/topic": {"confidence": 0.5, "probabilities": [{"value": "x", "confidence": 0.1}]}}


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        (chat("Hello"), [Part(text="Hello")]),
        (
            chat('{"topic": "x", "n": [1]}', confidence=SURE),
            [Part(fields=(Field("topic", "x", 0.5), Field("n", "[1]")))],
        ),
        (
            {"choices": [{"index": 1, "text": "b"}, {"text": "c"}]},
            [Part("Choice 2", "b"), Part(text="c")],
        ),
        (
            {"answers": [{"name": "ok", "type": "choice", "probabilities": SHARES}]},
            [Part("ok", shares=(Share("yes", 0.75), Share("no", 0.25)))],
        ),
        (
            {"data": [{"index": 0, "embedding": [0.5] * 9}]},
            [Part(text=", ".join(["0.5"] * 8) + ", … (9 numbers)")],
        ),
        (
            {"data": [{"score": 0.5}, {"score": 1}]},
            [Part("Scores", fields=(Field("0", "0.5"), Field("1", "1")))],
        ),
        ({"text": "spoken"}, [Part(text="spoken")]),
        ({"output": [{"type": "message", "content": [{"text": "out"}]}]}, [Part(text="out")]),
        (chat(""), [Part(text="(empty answer)")]),
    ],
)
def test_each_kind_of_answer_has_parts(body: dict[str, Any], parts: list[Part]) -> None:
    """A text, the fields of a JSON object with their confidence, numbers or probabilities."""
    assert list(row_view(3, row_of(body)).answer) == parts


def test_reasoning_and_tool_calls_are_separate_parts() -> None:
    """Arguments are shown as fields, and the input of a custom tool as text."""
    calls = [
        {"function": {"name": "look", "arguments": '{"at": 1}'}},
        {"type": "custom", "custom": {"name": "code", "input": '{"at": 1}'}},
    ]
    message = {"content": None, "reasoning": "Hm", "tool_calls": calls}
    view = row_view(1, row_of({"choices": [{"message": message, "finish_reason": "tool_calls"}]}))
    assert list(view.answer) == [
        Part("Reasoning", "Hm"),
        Part("Call of look", fields=(Field("at", "1"),)),
        Part("Call of code", '{"at": 1}'),
    ]
    assert view.words == ("tool_calls",)


def test_facts_are_those_of_the_row() -> None:
    """Both dialects of errors are read."""
    cut = facts_of(row_of(chat("x", finish_reason="length", confidence=SURE)))
    assert cut is not None
    assert (cut.status, cut.reasons, cut.num_tokens, cut.confidence) == (
        *("truncated", ("length",), 7, 0.5),
    )
    refused = facts_of(row_of({"error": {"code": "bad", "message": "No."}}, 400))
    vllm = facts_of(row_of(None, 500, error={"error": {"type": "bad", "message": "No."}}))
    assert refused is not None
    assert vllm is not None
    assert [(facts.status, facts.error_code, facts.text) for facts in (refused, vllm)] == [
        ("failed", "bad", "No.")
    ] * 2


def test_the_request_is_shown_as_turns_and_as_code() -> None:
    """The code contains the whole request, and its texts cannot end a string."""
    body = {
        "model": "m",
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "it's\n'''"}, {"type": "image_url"}],
            }
        ],
        "temperature": 0,
    }
    line = json.dumps({"custom_id": "a", "url": "/v1/chat/completions", "body": body}).encode()
    view = row_view(1, row_of(chat("x")), line, is_full=True)
    assert view.request == (
        Part("user", "it's\n'''\n[image_url]"),
        Part("Parameters", fields=(Field("temperature", "0"),)),
    )
    curl = shlex.split(view.curl.replace("\\\n", ""))
    assert curl[:2] == ["curl", "$OPENAI_BASE_URL/chat/completions"]
    assert json.loads(curl[-1]) == body
    found: dict[str, Any] = {}
    exec(view.python[view.python.index("body =") : view.python.index("print(")], found)  # noqa: S102
    assert found["body"] == body


def test_only_an_inline_recording_is_played() -> None:
    """A URL of another site is never loaded."""
    for url, is_played in (("data:audio/wav;base64,AA==", True), ("https://x.test/a.wav", False)):
        line = json.dumps({"url": "/v1/audio/transcriptions", "body": {"file_url": url}}).encode()
        view = row_view(1, row_of({"text": "spoken"}), line, is_full=True)
        assert bool(view.audio) is is_played


@pytest.mark.parametrize(
    ("part", "audio"),
    [
        (
            {"type": "input_audio", "input_audio": {"data": "AA==", "format": "mp3"}},
            "data:audio/mp3;base64,AA==",
        ),
        ({"type": "audio_url", "audio_url": {"url": "data:audio/ogg;base64,AA=="}}, None),
        ({"type": "audio_url", "audio_url": {"url": "https://x.test/a.wav"}}, ""),
        ({"type": "input_audio", "input_audio": 5}, ""),
    ],
)
def test_an_inline_recording_of_a_chat_is_played(part: Any, audio: str | None) -> None:
    """It is the first one of the conversation."""
    messages = [{"role": "system", "content": "Hm."}, {"role": "user", "content": [part]}]
    line = json.dumps({"url": "/v1/chat/completions", "body": {"messages": messages}}).encode()
    expected = part["audio_url"]["url"] if audio is None else audio
    assert row_view(1, row_of(chat("x")), line, is_full=True).audio == expected


def test_long_texts_are_cut_in_a_list_only() -> None:
    """The list says how many characters are missing."""
    row = row_of(chat("x" * 5000))
    (part,) = row_view(1, row).answer
    assert (len(part.text), part.num_more) == (1000, 4000)
    assert not row_view(1, row, is_full=True).is_cut


def test_a_row_that_is_too_large_is_named() -> None:
    """It is in the files of the batch."""
    view = row_view(9, None)
    assert (view.words, view.facts) == (("not shown",), None)
    assert "batch's files" in view.answer[0].text


HOSTILE = [
    *(b"", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"error":"x"}'),
    b'{"custom_id":"\\ud800<b>","error":{"code":{"a":1},"message":[1]}}',
    b'{"response":{"status_code":' + b"1" * 4000 + b',"body":{}}}',
    b'{"response":{"status_code":200,"body":' + b'{"a":' * 900 + b"1" + b"}" * 902,
    b'{"response":{"status_code":200,"body":{"choices":[{"text":"<b>\\ud800\\u202e"}]}}}',
    row_of(
        {"choices": [1, None, {"message": 3}, {"message": {"tool_calls": [3, {"function": {}}]}}]}
    ),
    row_of({"answers": [1, {"type": "predicate"}]}),
    row_of({"data": [{"embedding": [1e400]}]}),
]
REQUESTS = [
    None,
    b"",
    b'{"url":"/v1/x","body":' + b"[" * 150 + b"]" * 150 + b"}",
    b'{"url":"/v1/chat/completions","body":{"messages":[1,{"role":3,"content":[{"type":1},3]}]}}',
    b'{"url":"/v1/chat/completions","body":{"messages":[{"content":"<b>\\ud800"}],"a\\ud800":1}}',
    b'{"url":"/v1/decisions","body":{"questions":[1,{"choices":[1]}],"input":[3]}}',
]


@pytest.mark.parametrize("row", HOSTILE)
def test_hostile_bytes_become_text(row: bytes) -> None:
    """Whatever a row and its request contain, the page is valid UTF-8 without their markup."""
    views = [
        row_view(1, row, request, is_full=is_full)
        for request in REQUESTS
        for is_full in (True, False)
    ]
    page = render("row_list.html", rows=views, links=RowLinks.of_batch("b"))
    assert "<b>" not in page
    assert "\u202e" not in page
    page.encode()
    RowQuery.of({"text": "a", "max_confidence": "0.5"}).matches(facts_of(row))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"status": "x"}, "Unknown status"),
        ({"line": "-1"}, "line number must be a whole number"),
        ({"after": "9" * 400}, "position must be"),
        ({"max_confidence": "nan"}, "confidence must be a number between 0 and 1"),
        ({"text": "x" * 501}, "text must have at most 500 characters"),
    ],
)
def test_a_bad_search_is_refused(fields: dict[str, str], words: str) -> None:
    """The message names the field."""
    with pytest.raises(BadQuery, match=words):
        RowQuery.of(fields)


def test_a_search_starts_with_the_default_status() -> None:
    """With a condition it is for all rows, and its address names every condition."""
    assert RowQuery.of({}, "failed").status == "failed"
    assert RowQuery.of({"text": "x"}, "failed").status == ""
    query = RowQuery.of({"status": "ok", "text": "a&b", "min_chars": "0"})
    assert query.address(after=7) == "status=ok&text=a%26b&after=7"


def test_cells_of_a_table_are_shown_instead_of_the_request() -> None:
    """The request is folded; long cells are cut, and many columns are counted."""
    request = json.dumps({"url": "/v1/completions", "body": {"prompt": "Label: good"}}).encode()
    cells: dict[str, Any] = {"text": "<b>good</b>\u202e", "n": 4, "none": None, "long": "x" * 5000}
    view = row_view(7, row_of(chat("good")), request, cells=cells)
    (shown,) = view.cells
    assert shown.fields[:3] == (
        Field("text", "<b>good</b>\\u202e"),
        Field("n", "4"),
        Field("none", "null"),
    )
    assert view.is_cut
    page = render("row_requests.html", rows=[view], missing="", links=RowLinks.of_batch("batch_1"))
    assert page.index("&lt;b&gt;good") < page.index("<summary>Request</summary>")
    assert page.index("<summary>Request</summary>") < page.index("Label: good")
    wide = row_view(1, row_of(chat("a")), cells={str(n): n for n in range(210)}).cells
    assert wide[-1] == Part(text="… and 10 more columns")
