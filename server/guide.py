"""A server's own introduction: how its address, its model and its routes are used."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from engine.protocol.routes import CHAT_COMPLETIONS, COMPLETIONS, EMBEDDINGS

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


def sdk_lines(url: str, model: str, endpoints: Sequence[str], key: str) -> list[str]:
    """Return a program of three lines that asks the server by OpenAI's SDK.

    `endpoints` are the names of the routes that the model answers.
    """
    call = "models.list()"
    for endpoint, (method, fields, answer) in _CALLS.items():
        if endpoint in endpoints:
            given = {"model": model, **fields}
            words = ", ".join(f"{name}={json.dumps(value)}" for name, value in given.items())
            call = f"{method}({words}).{answer}"
            break
    return [
        "from openai import OpenAI",
        f'client = OpenAI(base_url="{url}/v1", api_key="{key}")',
        f"print(client.{call})",
    ]


def page(url: str, model: str, endpoints: Sequence[str], key: str) -> str:
    """Return what the server tells whoever opens its address."""
    lines = [
        f"Tidemill serves {model} here, with the API of OpenAI at {url}/v1",
        "",
        *sdk_lines(url, model, endpoints, key),
        "",
        "A file of requests, from a shell:",
        "",
        f"export TIDEMILL_BASE_URL={url}{'' if key == NO_KEY else f' TIDEMILL_API_KEY={key}'}",
        "tidemill submit requests.jsonl --wait",
        "",
        f"Requests: {', '.join(f'POST {name}' for name in endpoints)}" if endpoints else "",
        "Files and batches: /v1/files, /v1/uploads, /v1/batches",
        "The server: GET /v1/models, /health, /version, /metrics",
        "",
    ]
    return "\n".join(lines)


NO_KEY: Final = "none"
"""What clients send that must send some key, to a server that takes any."""
YOUR_KEY: Final = "YOUR_KEY"
