"""Other people's clients against the real stacks: API Gateway's address, Lambdas, and a worker."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from localstack.local import LocalCloud
from tests.clients.conftest import ENGINE, Api
from tests.clients.flow import CHAT, COMPLETION, answer_and_clear_away, cancel_on_the_way
from tests.clients.test_openai_batch import CHATS, create_and_resume, library_flow
from tests.localstack.conftest import replaced_workers
from tidemill import demo


@pytest.fixture
def api(cloud: LocalCloud) -> Api:
    """Return the deployment's API, as a client is configured for it."""
    return Api(f"{cloud.api_url}/v1", cloud.key)


@pytest.fixture
def client(api: Api) -> Iterator[openai.OpenAI]:
    """Return OpenAI's client, made as its documents say."""
    with openai.OpenAI(base_url=api.url, api_key=api.key) as client:
        yield client


@pytest.mark.long  # tests/clients has the library against a server and an API
def test_the_library_of_openai_batch_has_chats_answered(api: Api, tmp_path: Path) -> None:
    """It sends the file, makes the batch, waits for it, and has a good row for each request."""
    library_flow(api, tmp_path, CHATS)


@pytest.mark.long  # as tests/clients proves with engines that answer at once
def test_its_command_creates_and_another_one_resumes(api: Api, tmp_path: Path) -> None:
    """The first ends at once with the batch's id; the second waits and fetches both files."""
    create_and_resume(api, tmp_path)


@pytest.mark.long  # as tests/clients proves with engines that answer at once
@pytest.mark.parametrize(
    ("url", "body"), [("/chat/completions", CHAT), ("/completions", COMPLETION)]
)
def test_sglangs_twenty_requests_are_answered_and_cleared_away(
    client: openai.OpenAI, tmp_path: Path, url: str, body: dict[str, Any]
) -> None:
    """Their urls have no /v1; rows are in order, and both files can be deleted afterwards."""
    answer_and_clear_away(client, tmp_path / "in.jsonl", url, f"/v1{url}", body)


@pytest.mark.long  # as tests/clients proves with engines that answer at once
def test_sglangs_batch_is_cancelled_on_the_way(
    cloud: LocalCloud, client: openai.OpenAI, tmp_path: Path
) -> None:
    """Rows that were finished by then are kept; those that would take long are not waited for."""
    bodies = [{"model": demo.NAME, "wait": 0 if number < 10 else 100} for number in range(20)]
    engine = json.dumps([sys.executable, str(ENGINE)])
    with replaced_workers(cloud, TIDEMILL_ENGINE_COMMAND=engine):
        cancel_on_the_way(client, tmp_path / "in.jsonl", bodies)
