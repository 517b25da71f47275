"""The batch flow of SGLang's documentation: upload, run, poll, download, delete; and cancel."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from tidemill import demo

ENDED = {"completed", "failed", "expired", "cancelled"}
SECONDS = 180

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "What is 7 plus 5?"}]}
FORMED: dict[str, Any] = {
    **CHAT,
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "sum", "schema": {"enum": [11, 12]}},
    },
    "bad_words": ["eleven"],
    "logprobs": True,
    "logprob_token_ids": [5],
    "truncate_prompt_tokens": 500,
}
CALLING: dict[str, Any] = {
    **CHAT,
    "tools": [{"type": "function", "function": {"name": "add"}}],
    "tool_choice": "required",
}
COMPLETION: dict[str, Any] = {"prompt": "The capital of France is"}
SAMPLING: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "max_tokens": 12,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.3,
    "n": 1,
    "seed": 7,
    "stop": ["###"],
}
URLS = [
    pytest.param("/v1/chat/completions", "/v1/chat/completions", CHAT, id="chat"),
    pytest.param("/chat/completions", "/v1/chat/completions", CHAT, id="chat without v1"),
    pytest.param("/v1/chat/completions", "/v1/chat/completions", FORMED, id="chat of a form"),
    pytest.param("/v1/chat/completions", "/v1/chat/completions", CALLING, id="chat with tools"),
    pytest.param("/v1/completions", "/v1/completions", COMPLETION, id="text"),
    pytest.param("/completions", "/v1/completions", COMPLETION, id="text without v1"),
]


def write_file(path: Path, url: str, bodies: Sequence[dict[str, Any]]) -> None:
    """Write requests for one URL."""
    with path.open("w", encoding="utf-8") as file:
        for number, body in enumerate(bodies):
            line = {
                "custom_id": f"request-{number}",
                "method": "POST",
                "url": url,
                "body": body,
            }
            file.write(f"{json.dumps(line)}\n")


def submit(client: openai.OpenAI, path: Path, endpoint: Any) -> Batch:
    """Upload a file and create a batch from it."""
    with path.open("rb") as file:
        uploaded = client.files.create(file=file, purpose="batch")
    return client.batches.create(
        input_file_id=uploaded.id, endpoint=endpoint, completion_window="24h"
    )


def poll(client: openai.OpenAI, batch: Batch, holds: Callable[[Batch], bool]) -> Batch:
    """Return the batch as soon as a condition holds."""
    deadline = time.monotonic() + SECONDS
    while not holds(batch):
        assert time.monotonic() < deadline, f"it is still {batch.status}"
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    return batch


def has_ended(batch: Batch) -> bool:
    """Say whether the batch has ended."""
    return batch.status in ENDED


def answer_and_clear_away(
    client: openai.OpenAI, path: Path, url: str, endpoint: str, body: dict[str, Any]
) -> None:
    """Run twenty requests, check the rows, and delete both files."""
    write_file(path, url, [{"model": demo.NAME, **body, **SAMPLING}] * 20)
    batch = poll(client, submit(client, path, endpoint), has_ended)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.completed == 20
    assert batch.output_file_id is not None
    rows = [json.loads(line) for line in client.files.content(batch.output_file_id).iter_lines()]
    assert [row["custom_id"] for row in rows] == [f"request-{number}" for number in range(20)]
    assert all(row["response"]["body"]["choices"] for row in rows)
    for file_id in (batch.input_file_id, batch.output_file_id):
        assert client.files.delete(file_id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file_id)


def cancel_on_the_way(client: openai.OpenAI, path: Path, bodies: Sequence[dict[str, Any]]) -> None:
    """Cancel a batch with some finished rows, check the kept rows, and delete both files."""
    write_file(path, "/chat/completions", bodies)
    batch = submit(client, path, "/v1/chat/completions")
    batch = poll(
        client,
        batch,
        lambda batch: (
            bool(batch.request_counts and batch.request_counts.completed) or has_ended(batch)
        ),
    )
    assert batch.status == "in_progress", batch
    assert client.batches.cancel(batch.id).status in {"cancelling", "cancelled"}
    batch = poll(client, batch, has_ended)
    assert batch.status == "cancelled"
    assert batch.request_counts is not None
    assert batch.output_file_id is not None
    rows = client.files.content(batch.output_file_id).text.splitlines()
    assert 0 < len(rows) < len(bodies)
    assert batch.request_counts.completed == len(rows)
    assert batch.request_counts.failed == 0
    for file_id in (batch.input_file_id, batch.output_file_id):
        assert client.files.delete(file_id).deleted
