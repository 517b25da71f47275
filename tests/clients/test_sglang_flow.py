"""The batch flow of SGLang's documentation: upload, poll, download, delete; and a cancel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.clients.conftest import SCRIPTED
from tests.clients.flow import URLS, answer_and_clear_away, cancel_on_the_way


@pytest.mark.parametrize(("url", "endpoint", "body"), URLS)
def test_twenty_requests_run_and_are_deleted(
    client: openai.OpenAI, tmp_path: Path, url: str, endpoint: str, body: dict[str, Any]
) -> None:
    """Rows come in the order of the requests; input and output can be deleted afterwards."""
    answer_and_clear_away(client, tmp_path / "in.jsonl", url, endpoint, body)


@pytest.mark.long  # test_commands.py cancels fewer
def test_five_thousand_requests_are_cancelled_on_the_way(
    client: openai.OpenAI, tmp_path: Path
) -> None:
    """Finished rows are kept and counted; the files can be deleted."""
    bodies = [{"model": SCRIPTED, "wait": 0.2}] * 5000
    cancel_on_the_way(client, tmp_path / "in.jsonl", bodies)
