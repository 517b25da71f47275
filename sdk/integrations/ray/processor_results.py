"""Processor results: an engine's rows as the columns of Ray's processors."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from typing import Any, Final

from pydantic_core import from_json

from tidemill.batch.file.rows import row_error_message

ROWS: Final = "__tidemill_row"
"""Column of rows as the engine prints them."""

ERROR: Final = "__inference_error__"
"""Ray's column for the error of a row; empty for a successful row."""


def result_columns(task_type: str, row: bytes) -> dict[str, Any]:
    """Return the columns of an answer; Ray's columns without a value for this task are null."""
    parsed: Mapping[str, Any] = from_json(row)
    columns: dict[str, Any] = {
        "prompt_token_ids": None,
        "num_input_tokens": 0,
        "generated_tokens": [],
        "generated_text": "",
        "num_generated_tokens": 0,
        "embeddings": None,
        "metrics": None,
        "logprobs": None,
        "prompt_logprobs": None,
        ERROR: row_error_message(parsed) or "",
    }
    if columns[ERROR]:
        return columns
    body = parsed["response"]["body"]
    usage = body.get("usage") or {}
    columns["num_input_tokens"] = usage.get("prompt_tokens", 0)
    if task_type == "generate":
        return columns | _text_columns(body, usage)
    return columns | {"embeddings": _numbers(task_type, body)}


def _text_columns(body: Mapping[str, Any], usage: Mapping[str, Any]) -> dict[str, Any]:
    choice = body["choices"][0]
    message = choice.get("message")
    text = choice.get("text") if message is None else message.get("content")
    return {
        "prompt_token_ids": body.get("prompt_token_ids") or choice.get("prompt_token_ids"),
        "generated_tokens": choice.get("token_ids") or [],
        "generated_text": text or "",
        "num_generated_tokens": usage.get("completion_tokens", 0),
    }


def _numbers(task_type: str, body: Mapping[str, Any]) -> Any:
    """Return a vector, or the score of a pair as a vector of length 1."""
    import numpy as np  # late: nothing else in the driver needs it

    found = body["data"][0]
    if task_type == "embed":
        return np.frombuffer(b64decode(found["embedding"]), "<f4")
    return np.array([found["score"]], np.float32)
