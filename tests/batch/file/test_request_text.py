"""Readable content of requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tidemill.batch.file.request_text import request_text

USER = {"role": "user", "content": [{"type": "input_text", "text": "What?"}]}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"messages": [{"role": "user", "content": "What?"}]}, "user: What?"),
        ({"prompt": "What?"}, "What?"),
        ({"input": "What?", "instructions": "Be brief."}, "Be brief.\nWhat?"),
        (
            {"input": [USER, CALL], "instructions": "Be brief."},
            f"Be brief.\nuser: What?\n{json.dumps(CALL)}",
        ),
        ({"input": ["a", "b"]}, '{"input": ["a", "b"]}'),
    ],
)
def test_a_request_is_shown_as_the_model_reads_it(body: dict[str, Any], text: str) -> None:
    """The instructions of a response come first."""
    assert request_text(body) == text
