"""Files and batches on a local server, as in SGLang's documentation: no cloud, one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.clients.flow import (
    CHAT,
    URLS,
    answer_and_clear_away,
    cancel_on_the_way,
    has_ended,
    poll,
    submit,
    write_file,
)
from tidemill import demo


@pytest.mark.parametrize(("url", "endpoint", "body"), URLS)
def test_twenty_requests_run_and_are_deleted(
    client: openai.OpenAI, tmp_path: Path, url: str, endpoint: str, body: dict[str, Any]
) -> None:
    """Rows come in the order of the requests; input and output can be deleted afterwards."""
    answer_and_clear_away(client, tmp_path / "in.jsonl", url, endpoint, body)


def test_thousands_of_requests_are_cancelled_on_the_way(
    client: openai.OpenAI, tmp_path: Path
) -> None:
    """Finished rows are kept and counted; the files can be deleted."""
    body = {"model": demo.NAME, **CHAT, "max_tokens": 64, "ignore_eos": True}
    bodies = [{**body, "temperature": 1, "seed": seed} for seed in range(2_000)]
    cancel_on_the_way(client, tmp_path / "in.jsonl", bodies)


def test_interactive_requests_are_answered_while_a_batch_runs(
    client: openai.OpenAI, tmp_path: Path
) -> None:
    """A chat among thousands of lines is answered before them."""
    body = {"model": demo.NAME, **CHAT, "max_tokens": 64, "ignore_eos": True}
    write_file(
        tmp_path / "in.jsonl",
        "/v1/chat/completions",
        [{**body, "temperature": 1, "seed": seed} for seed in range(2_000)],
    )
    batch = submit(client, tmp_path / "in.jsonl", "/v1/chat/completions")
    batch = poll(client, batch, lambda batch: batch.status == "in_progress" or has_ended(batch))
    answer = client.chat.completions.create(model=demo.NAME, **CHAT, max_tokens=8)
    assert answer.choices[0].message.content
    batch = client.batches.retrieve(batch.id)
    assert batch.status == "in_progress"
    assert batch.request_counts is not None
    assert batch.request_counts.completed < 1_000
    client.batches.cancel(batch.id)
    assert poll(client, batch, has_ended).status == "cancelled"


def test_a_streaming_line_fails_its_file(client: openai.OpenAI, tmp_path: Path) -> None:
    """It fails before anything runs, with the line's number, because rows cannot stream."""
    body = {"model": demo.NAME, **CHAT, "max_tokens": 4}
    write_file(tmp_path / "in.jsonl", "/v1/chat/completions", [body, {**body, "stream": True}])
    batch = poll(client, submit(client, tmp_path / "in.jsonl", "/v1/chat/completions"), has_ended)
    assert batch.status == "failed"
    assert batch.errors is not None
    [error] = batch.errors.data or []
    assert (error.code, error.line) == ("stream_not_supported", 2)
