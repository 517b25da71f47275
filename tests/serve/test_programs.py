"""Other people's programs, unchanged, against `tidemill serve`, and their results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.server.served import Place, serving
from tests.clients.program_scripts import BATCHES, PAGE, program, programs, run_program, table
from tests.long_parameters import with_long
from tests.serve.conftest import KEY
from tools.demo.train_reranker import base_path

LISBON = {"city": "Lisbon"}
QUICK: dict[str, Any] = {
    "langchain_openai": {
        "whole": "Paris",
        "counted": True,
        "streamed": "Paris",
        "many": ["Paris", "19"],
        "schema": LISBON,
    },
    "pydantic_ai": {
        "whole": "Paris",
        "streamed": "Paris",
        "by_tool": ["city"],
        "by_schema": LISBON,
    },
}
# Decisions by OpenAI's own client are in test_openai_sdk.py.
DECISIONS: dict[str, Any] = {
    "langchain_decisions": {
        "named": ["city", "kind", "tone"],
        "sum": 1.0,
        "options": 2,
        "levels": ["calm", "annoyed", "furious"],
        "counted": True,
        "message": True,
    },
}
CHATS: dict[str, Any] = {
    "anthropic": {
        "whole": "Paris",
        "streamed": "Paris",
        "ended": ["end_turn", "end_turn", "s"],
        "schema": LISBON,
        "counted": True,
        "refused": "not_found_error",
        "batch": ["Paris", "not_found_error"],
        "listed": True,
        "deleted": "message_batch_deleted",
    },
    "autobatcher": {"chat": "Paris", "responses": ["19", "20"], "batch": ["19", "20"]},
    "guidellm": {
        "totals": {"successful": 10, "errored": 0, "incomplete": 0, "total": 10},
        "written": True,
        "timed": True,
        "counted": True,
    },
    "instructor": {"TOOLS": ["city"], "JSON_SCHEMA": LISBON},
    "lm_eval": {"chats": 1.0, "continued": 1.0, "chosen": 1.0},
    "lotus": {"rows": 3, "answered": [True, True, True], "kept": True},
    "mirascope": {
        "provider": "openai",
        "whole": "Paris",
        "streamed": "Paris",
        "schema": LISBON,
        "continued": "Paris",
    },
    "nemo_curator": {"one": ["19"], "many": [["20"], ["21"], ["22"]]},
    "ray_data": {"sums": [str(number + 19) for number in range(8)]},
}
# These also request vectors from a server.
VECTORS: dict[str, Any] = {
    "cohere": {"order": [1, 2], "falling": True},
    "daft": {"answers": ["19", "20"], "vectors": [384, 384]},
    "langchain_embeddings": {"vectors": [384, 384]},
    "litellm": {"whole": "Paris", "streamed": "Paris", "vectors": [384, 384], "ranked": [1]},
    "llama_index": {
        "whole": "Paris",
        "streamed": "Paris",
        "completed": " Paris",
        "completed_alike": True,
        "vectors": [384, 384],
    },
}
# This one uses a server without keys: on this machine, and on another.
DATATROVE = {"chats": [["19", "19"], ["20", "20"]], "completions": [[" Paris"]]}


@pytest.mark.parametrize(
    "name",
    with_long(["pydantic_ai"], ("langchain_openai", *CHATS, *BATCHES, *DECISIONS)),
)
def test_a_program_gets_its_results(name: str, place: Place, tmp_path: Path) -> None:
    """It is configured only with the address and the key."""
    got = run_program(program(name), tmp_path, f"{place.url}/v1", KEY)
    assert got == (QUICK | CHATS | BATCHES | DECISIONS)[name]


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A server of an embedding model, which also reranks."""
    flags = ("--model", str(base_path()), "--served-model-name", "vectors")
    with serving(*flags, log=tmp_path_factory.mktemp("vectors") / "log", key=KEY) as place:
        yield place


@pytest.mark.long
@pytest.mark.parametrize("name", VECTORS)
def test_a_program_gets_vectors_and_rankings(
    name: str, place: Place, vectors: Place, tmp_path: Path
) -> None:
    """They come from a second address, with the same key."""
    more = {"VECTORS_BASE_URL": f"{vectors.url}/v1"}
    got = run_program(program(name), tmp_path, f"{place.url}/v1", KEY, **more)
    assert got == VECTORS[name]


@pytest.mark.long
def test_datatroves_runner_uses_local_and_remote_servers(tmp_path: Path) -> None:
    """It treats any unusual address as remote, and uses OpenAI's client for it."""
    with serving(log=tmp_path / "log") as place:
        for host in ("127.0.0.1", "0.0.0.0"):  # noqa: S104 - connects, does not bind
            folder = tmp_path / host
            folder.mkdir()
            url = f"http://{host}:{place.port}/v1"
            assert run_program(program("datatrove"), folder, url, "none") == DATATROVE


def test_every_script_is_run() -> None:
    """Every script belongs to a test."""
    run = {*QUICK, *CHATS, *BATCHES, *DECISIONS, *VECTORS, "datatrove"}
    assert {each.name for each in programs()} == run


def test_the_page_has_the_table_of_the_scripts() -> None:
    """`python -m tests.clients.program_scripts` updates it."""
    assert table() in PAGE.read_text(encoding="utf-8")
