"""Bodies of requests: JSON objects, read so that no bytes whatever become a fault of ours."""

from __future__ import annotations

import base64
from typing import Any

from pydantic_core import from_json

from handler.api.errors import Refused

_FORM = "multipart/form-data"


def as_text(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event whose body is text, unless it is a form, which is read as bytes.

    What is no UTF-8 is smuggled through as surrogates, so that `read_json` refuses it.
    """
    headers = {name.lower(): str(value) for name, value in (event.get("headers") or {}).items()}
    is_form = headers.get("content-type", "").strip().lower().startswith(_FORM)
    if is_form or not event.get("isBase64Encoded") or not event.get("body"):
        return event
    text = base64.b64decode(event["body"]).decode("utf-8", "surrogateescape")
    return event | {"body": text, "isBase64Encoded": False}


def read_json(text: str) -> dict[str, Any]:
    """Return the object that a body is; raises Refused for any other."""
    try:
        found = from_json(text.encode("utf-8", "surrogateescape"))
    except ValueError as exc:  # nested too deeply, a lone surrogate, an endless number, no UTF-8
        raise Refused(f"The body is no JSON: {exc}.", code="invalid_json") from exc
    if not isinstance(found, dict):
        raise Refused("The body must be a JSON object.", code="invalid_json")
    return found
