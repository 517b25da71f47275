"""Rows of other vendors' batch files in the vendor's form, as its own batches write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tidemill.protocol.vendors.anthropic_answers import message_error, message_of_chat
from tidemill.protocol.vendors.converse import converse_of_chat, is_converse
from tidemill.protocol.vendors.gemini import contents_error, contents_of_chat

from .lines import Vendor
from .rows import row_error
from .vendor_lines import is_anthropic

FORMS: Final[tuple[Vendor, ...]] = ("anthropic", "bedrock", "gemini")
"""Vendors whose rows differ from OpenAI's."""

_TITAN_REASONS: Final = {"length": "LENGTH", "stop": "FINISHED"}
_NOT_RUN: Final = {
    "batch_expired": "expired",
    "batch_cancelled": "canceled",
}
_INTERNAL: Final = 500


def vendor_row(vendor: Vendor, line: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a vendor's line; `row` is OpenAI's.

    Raises ValueError for an answer that is not one of the line.
    """
    try:
        return _row(vendor, line, row)
    except (AttributeError, IndexError, KeyError, TypeError) as exc:
        raise ValueError("is not an answer to its request") from exc


def _row(vendor: Vendor, line: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    error = row_error(row)
    response = row.get("response") or {}
    status_code = response.get("status_code") or _status_of(error)
    body = None if error is not None else response["body"]
    message = "" if error is None else str(error.get("message"))
    request_id = response.get("request_id")
    match vendor:
        case "anthropic":
            code = None if error is None else error.get("code")
            result = _result(body, code, message_error(status_code, message, request_id))
            return {"custom_id": row["custom_id"], "result": result}
        case "bedrock":
            given = line.get("modelInput")
            shown: dict[str, Any] = {"recordId": row["custom_id"], "modelInput": given}
            if body is None:
                return shown | {"error": {"errorCode": status_code, "errorMessage": message}}
            return shown | {"modelOutput": _model_output(given, body)}
    key = {"key": line["key"]} if "key" in line else {"request": line.get("request"), "status": ""}
    if body is None:
        return key | {"error": contents_error(status_code, message)}
    return key | {"response": contents_of_chat(body)}


def _status_of(error: Mapping[str, Any] | None) -> int:
    """Return the status of a row without a response: the line was not valid, or did not run."""
    code = None if error is None else error.get("code")
    return 400 if code == "invalid_json_line" else _INTERNAL


def _result(body: Mapping[str, Any] | None, code: Any, error: dict[str, Any]) -> dict[str, Any]:
    if body is not None:
        return {"type": "succeeded", "message": message_of_chat(body)}
    if code in _NOT_RUN:
        return {"type": _NOT_RUN[code]}
    return {"type": "errored", "error": error}


def _model_output(given: Any, body: Mapping[str, Any]) -> Any:
    """Return the answer in the form of its `modelInput`."""
    if not isinstance(given, dict):
        return body
    if is_converse(given):
        return converse_of_chat(body)
    if is_anthropic(given):
        return message_of_chat(body)
    if "inputText" in given:
        usage = body.get("usage") or {}
        tokens = {"inputTextTokenCount": usage.get("prompt_tokens", 0)}
        if given.get("textGenerationConfig") is None:
            return {"embedding": body["data"][0]["embedding"], **tokens}
        choice = body["choices"][0]
        result = {
            "tokenCount": usage.get("completion_tokens", 0),
            "outputText": choice["text"],
            "completionReason": _TITAN_REASONS.get(choice["finish_reason"], "CONTENT_FILTERED"),
        }
        return {**tokens, "results": [result]}
    return body
