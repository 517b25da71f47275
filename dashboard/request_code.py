"""Code that sends the request of a row: to copy from the page."""

from __future__ import annotations

import json
from pprint import pformat
from shlex import quote
from typing import Any, Final

_MAX_CHARS: Final = 100_000
_PYTHON: Final = """from openai import OpenAI

client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
body = {body}
print(client.post({path!r}, cast_to=object, body=body))
"""


def curl_of(request: object) -> str:
    """Return a curl command; empty for bytes that are not a request, or for a long one."""
    found = _parts(request)
    if found is None:
        return ""
    path, body = found
    return (
        f'curl "$OPENAI_BASE_URL"{quote(path)} \\\n'
        '  -H "Authorization: Bearer $OPENAI_API_KEY" \\\n'
        "  -H 'Content-Type: application/json' \\\n"
        f"  --data-raw {quote(json.dumps(body))}\n"
    )


def python_of(request: object) -> str:
    """Return Python code for OpenAI's SDK; empty as above."""
    found = _parts(request)
    if found is None:
        return ""
    path, body = found
    return _PYTHON.format(body=pformat(body, width=88, sort_dicts=False), path=path)


def _parts(request: object) -> tuple[str, dict[str, Any]] | None:
    """Return the path after `/v1` and the body."""
    fields = request if isinstance(request, dict) else {}
    url, body = fields.get("url"), fields.get("body")
    if not isinstance(url, str) or not isinstance(body, dict):
        return None
    if len(json.dumps(body)) > _MAX_CHARS:
        return None
    return "/" + url.removeprefix("/v1/").lstrip("/"), body
