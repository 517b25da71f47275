"""Guide: the plain-text page at `/` with examples of the server's address, model and routes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tidemill.protocol.routes import CHAT_COMPLETIONS, COMPLETIONS, EMBEDDINGS

_HELLO: Final = {"role": "user", "content": "Hello"}
_CALLS: Final[Mapping[str, tuple[str, Mapping[str, Any], str]]] = {
    CHAT_COMPLETIONS.name: (
        "chat.completions.create",
        {"messages": [_HELLO]},
        "choices[0].message.content",
    ),
    COMPLETIONS.name: ("completions.create", {"prompt": "Hello"}, "choices[0].text"),
    EMBEDDINGS.name: ("embeddings.create", {"input": "Hello"}, "data[0].embedding"),
}


def sdk_example(url: str, model: str, endpoints: Sequence[str], key: str) -> list[str]:
    """Return a three-line program that calls the server with OpenAI's SDK.

    `endpoints` are the names of the routes that the model answers.
    """
    call = "models.list()"
    for endpoint, (method, fields, answer) in _CALLS.items():
        if endpoint in endpoints:
            arguments = {"model": model, **fields}
            words = ", ".join(f"{name}={json.dumps(value)}" for name, value in arguments.items())
            call = f"{method}({words}).{answer}"
            break
    return [
        "from openai import OpenAI",
        f'client = OpenAI(base_url="{url}/v1", api_key="{key}")',
        f"print(client.{call})",
    ]


def guide_text(url: str, model: str, endpoints: Sequence[str], key: str) -> str:
    """Return the page that a browser sees at the server's address."""
    lines = [
        f"Tidemill serves {model} with an OpenAI-compatible API at {url}/v1",
        "",
        *sdk_example(url, model, endpoints, key),
        "",
        "Run a file of requests from a shell:",
        "",
        f"export TIDEMILL_BASE_URL={url}{'' if key == NO_KEY else f' TIDEMILL_API_KEY={key}'}",
        "tidemill submit requests.jsonl --wait",
        "",
        f"Requests: {', '.join(f'POST {name}' for name in endpoints)}" if endpoints else "",
        "Files and batches: /v1/files, /v1/uploads, /v1/batches",
        "Server information: GET /v1/models, /health, /version, /metrics",
        "",
    ]
    return "\n".join(lines)


NO_KEY: Final = "none"
"""The placeholder key of clients that must send one, for a server without keys."""
YOUR_KEY: Final = "YOUR_KEY"
