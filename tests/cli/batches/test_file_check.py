"""What is said about a file before it is sent."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from tidemill.cli.batches.file_check import FileReport, check_file

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
def test_input_tokens_are_guessed_from_what_is_asked(body: dict[str, Any], tokens: int) -> None:
    """Four bytes each; ids of tokens are counted. Nothing in a body is too odd for it."""
    assert checked(body).input_tokens == tokens


def test_output_tokens_are_what_the_requests_allow() -> None:
    """For each choice; those that name no limit are counted apart."""
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
def test_who_writes_nothing_is_asked_for_no_limit(
    url: str, body: dict[str, Any], tokens: int
) -> None:
    """A vector has no tokens, and a recording's words are as many as are said."""
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
def test_faults_of_every_body_are_told_with_line_and_field(
    url: str, body: dict[str, Any], field: str
) -> None:
    """Before a worker is paid for: the engine's own words, and where they hold."""
    report = checked(GOOD[url.rsplit("/", 1)[-1]], body, url=url)
    [told] = report.failing.sentences("line")
    assert field in told
    assert "line 2" in told


def test_models_are_not_judged_when_nobody_has_said_which_there_are() -> None:
    """All others of a file are compared with its first one all the same."""
    assert checked({"model": "m"}, {}).verdict.num_errors == 0
    report = checked({"model": "m"}, {"model": "other"})
    assert [error.code for error in report.verdict.errors] == ["model_mismatch"]
    report = checked({"model": 5})
    assert [error.message for error in report.verdict.errors] == [
        "`model` must be a string. Name one that is served."
    ]


def test_bytes_are_told_as_they_are_read() -> None:
    """All of them, so that a bar comes to its end."""
    shown: list[int] = []
    content = b'{"custom_id": "a", "url": "/v1/completions", "body": {}}\n\n' * 3
    report = check_file(io.BytesIO(content), models=None, on_invalid_line="skip", show=shown.append)
    assert sum(shown) == len(content) == report.num_bytes
