"""Tests of the file check before an upload."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from tidemill.cli.batches.file_check import FileReport, check_file
from tidemill.engine.structured_output.constraint_check import ConstraintCheck
from tidemill.protocol.chat import ChatCompletionRequest

URL = "/v1/chat/completions"


def checked(*bodies: dict[str, Any], url: str = URL, models: list[str] | None = None) -> FileReport:
    """Return what is found in a file of these bodies."""
    lines = [
        json.dumps({"custom_id": str(number), "url": url, "body": body})
        for number, body in enumerate(bodies)
    ]
    named = None if models is None else {model: model for model in models}
    return check_file(io.BytesIO("\n".join(lines).encode()), models=named, on_invalid_line="fail")


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"messages": [{"role": "user", "content": "x" * 40}]}, 10),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 8}]}]}, 2),
        ({"messages": [{"role": "user", "content": None}, 5, "x"]}, 2),
        ({"prompt": ["x" * 8, "é" * 4]}, 4),
        ({"prompt": [1, 2, 3]}, 3),
        ({"prompt": 2.5}, 0),
    ],
)
def test_input_tokens_are_estimated_from_the_prompt(body: dict[str, Any], tokens: int) -> None:
    """Four bytes are a token; token IDs are counted; malformed bodies are accepted."""
    assert checked(body).input_tokens == tokens


def test_output_tokens_are_what_the_requests_allow() -> None:
    """Tokens count per choice; requests without a limit are counted separately."""
    limits = ({"max_tokens": 5}, {"max_completion_tokens": 7, "n": 2}, {"max_tokens": "many"}, {})
    report = checked(*({"messages": []} | limit for limit in limits))
    assert (report.output_tokens, report.num_unlimited) == (19, 2)


@pytest.mark.parametrize(
    ("url", "body", "tokens"),
    [
        ("/v1/embeddings", {"input": ["x" * 40, "y" * 8]}, 12),
        ("/v1/score", {"queries": "x" * 8, "documents": ["x" * 40, "y" * 8]}, 14),
        ("/v1/rerank", {"query": "x" * 8, "documents": ["x" * 40]}, 12),
        ("/v1/audio/transcriptions", {"file_url": "https://example.org/a.wav"}, 0),
    ],
)
def test_requests_without_generated_text_need_no_limit(
    url: str, body: dict[str, Any], tokens: int
) -> None:
    """Vectors have no output tokens, and a recording determines the length of its transcript."""
    report = checked(body, url=url)
    assert (report.verdict.num_errors, report.failing.count) == (0, 0)
    assert (report.input_tokens, report.writes, report.num_unlimited) == (tokens, False, 0)


_SOUND = {"file_url": "https://example.org/a.wav"}
GOOD: dict[str, dict[str, Any]] = {
    "embeddings": {"input": "x"},
    "score": {"text_1": "x", "text_2": "y"},
    "rerank": {"query": "x", "documents": ["y"]},
    "transcriptions": _SOUND,
    "translations": _SOUND,
}


@pytest.mark.parametrize(
    ("url", "body", "field"),
    [
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "int4"}, "encoding_format"),
        ("/v1/score", {"text_1": "x"}, "text_2"),
        ("/v2/rerank", {"query": "x", "documents": []}, "documents"),
        ("/v1/audio/transcriptions", {"file": "UklGRg=="}, "file_url"),
        ("/v1/audio/translations", {"file_url": "ftp://example.org/a.wav"}, "file_url"),
    ],
)
def test_errors_of_every_body_name_line_and_field(
    url: str, body: dict[str, Any], field: str
) -> None:
    """The check reports the engine's message and its location."""
    report = checked(GOOD[url.rsplit("/", 1)[-1]], body, url=url)
    [message] = report.failing.sentences("line")
    assert field in message
    assert "line 2" in message


_MESSAGES = [{"role": "user", "content": "x"}]
_BAD_SCHEMA = {"type": "string", "minLength": 5, "maxLength": 3}
_BAD_ARGUMENTS = {"type": "object", "properties": {"a": _BAD_SCHEMA}, "required": ["a"]}
_BAD_TOOL = {"name": "f", "parameters": _BAD_ARGUMENTS}
_BAD: dict[str, dict[str, Any]] = {
    "response_format": {
        "response_format": {"type": "json_schema", "json_schema": {"schema": _BAD_SCHEMA}}
    },
    "regex": {"regex": "[a-z"},
    "lark": {"grammar": "start: A"},
    "gbnf": {"ebnf": "root ::= foo"},
    "stop_regex": {"stop_regex": "[a-z"},
    "tag": {"structural_tag": {"format": {"type": "regex", "pattern": "(a"}}},
    "called": {"tools": [{"type": "function", "function": _BAD_TOOL}], "tool_choice": "required"},
    "strict": {"tools": [{"type": "function", "function": _BAD_TOOL | {"strict": True}}]},
}
_GOOD: dict[str, dict[str, Any]] = {
    "a tool that is not strict": {"tools": [{"type": "function", "function": _BAD_TOOL}]},
    "a token of the model": {"grammar": "start: <|im_end|> | <[999999]>"},
    "a choice": {"guided_choice": ["a", "b"]},
}


@pytest.mark.parametrize(
    ("body", "num_failing"),
    [*((each, 1) for each in _BAD.values()), *((each, 0) for each in _GOOD.values())],
    ids=[*_BAD, *_GOOD],
)
def test_constraints_are_compiled_before_anything_runs(
    body: dict[str, Any], num_failing: int
) -> None:
    """Constraints that an engine cannot compile are named; those of a vocabulary are not judged."""
    report = checked({"messages": _MESSAGES}, {"messages": _MESSAGES, **body})
    assert (report.failing.count, report.num_uncompiled) == (num_failing, 0)


def test_each_distinct_constraint_is_compiled_once() -> None:
    """Equal schemas are compiled once; constraints beyond the time limit stay unchecked."""
    requests = [
        ChatCompletionRequest.model_validate({"messages": _MESSAGES, "regex": pattern})
        for pattern in ("a+", "b+", "a+", "b+")
    ]
    check, late = ConstraintCheck(), ConstraintCheck(max_seconds=0)
    for request in requests:
        check.check(request)
        late.check(request)
    assert (check.num_compiled, check.num_unchecked) == (2, 0)
    assert (late.num_compiled, late.num_unchecked) == (0, 4)


def test_constraints_stay_unchecked_without_their_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The base package lacks the compiler: such lines are counted, not refused."""
    monkeypatch.setattr("tidemill.cli.batches.file_check.has_compiler", lambda: False)
    report = checked({"messages": _MESSAGES, **_BAD["regex"]}, {"messages": _MESSAGES})
    assert (report.failing.count, report.num_uncompiled) == (0, 1)


def test_models_are_not_checked_when_the_served_ones_are_unknown() -> None:
    """The models of a file are still compared with its first one."""
    assert checked({"model": "m"}, {}).verdict.num_errors == 0
    report = checked({"model": "m"}, {"model": "other"})
    assert [error.code for error in report.verdict.errors] == ["model_mismatch"]
    report = checked({"model": 5})
    assert [error.message for error in report.verdict.errors] == [
        "`model` must be a string. Use the name of a served model."
    ]


def test_progress_is_reported_in_bytes() -> None:
    """All bytes are reported, so that a bar reaches its end."""
    shown: list[int] = []
    content = b'{"custom_id": "a", "url": "/v1/completions", "body": {}}\n\n' * 3
    report = check_file(io.BytesIO(content), models=None, on_invalid_line="skip", show=shown.append)
    assert sum(shown) == len(content) == report.num_bytes
