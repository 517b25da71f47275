"""openai-batch, unchanged: its library and its command, each installed as its users do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import ROOT, SCRIPTED, Api
from tidemill import demo

LIBRARY, COMMAND = (
    ROOT / f".venv-openai-batch-{version}/bin/python" for version in ("0.3.3", "0.3.4")
)
QUICK_POLLS = Path(__file__).parent / "quick_polls"
SECONDS = 120
CHATS = [
    {"model": demo.NAME, "messages": [{"role": "user", "content": f"What is {number} plus 4?"}]}
    for number in range(3, 9)
]
EMBEDDINGS = [{"model": SCRIPTED, "input": text} for text in ("tide", "mill")]
RERANKS = [
    {"model": SCRIPTED, "query": "water", "documents": ["tide", "mill"], "top_n": number}
    for number in (1, 2)
]
SCORES = [{"model": SCRIPTED, "text_1": "tide", "text_2": text} for text in ("ebb", "flood")]

FLOW = """
import json, sys
from openai_batch import Batch
from openai_batch.providers import Provider

folder, url, key, requests = sys.argv[1:]
with Batch(
    submission_input_file=f"{folder}/in.jsonl",
    output_file=f"{folder}/out.jsonl",
    error_file=f"{folder}/errors.jsonl",
    provider=Provider(base_url=url, api_key=key),
) as batch:
    for request in json.loads(requests):
        batch.add_to_batch(**request)
    ended, output, errors = batch.submit_wait_download(interval=0.2)
print(json.dumps([ended.status, output, errors]))
"""


def installed(python: Path) -> Path:
    """Return the interpreter of a client's environment; fails if it is missing."""
    assert python.exists(), f"{python.parent.parent.name} is missing: `make test` installs it"
    return python


def run(python: Path, *arguments: object) -> str:
    """Return the output of a client; fails with the whole output unless it exits with 0."""
    done = subprocess.run(
        [str(installed(python)), *map(str, arguments)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(QUICK_POLLS)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rows_in(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def requests_file(path: Path, bodies: list[dict[str, Any]], url: str) -> Path:
    """Write a request file and return its path."""
    lines = [
        {"custom_id": f"c{number}", "method": "POST", "url": url, "body": body}
        for number, body in enumerate(bodies)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


def library_flow(api: Api, folder: Path, requests: list[dict[str, Any]]) -> None:
    """Run requests through the library: each has a successful row, in order."""
    stdout = run(LIBRARY, "-c", FLOW, folder, api.url, api.key, json.dumps(requests))
    output = folder / "out.jsonl"
    assert json.loads(stdout.splitlines()[-1]) == ["completed", str(output), None]
    rows = rows_in(output)
    assert [row["custom_id"] for row in rows] == [
        f"line-{number}" for number in range(1, len(requests) + 1)
    ]
    assert {row["response"]["status_code"] for row in rows} == {200}


def create_and_resume(api: Api, folder: Path) -> None:
    """Create a batch with the command, and download it with another: rows, and one error."""
    bad = [*CHATS, {**CHATS[0], "temperature": -1}]
    given = requests_file(folder / "in.jsonl", bad, "/v1/chat/completions")
    where = ("--base-url", api.url, "--api-key", api.key)
    stdout = run(COMMAND, "-m", "openai_batch.run", "--create", given, *where)
    found = re.search(r"Created (batch_\w+)", stdout)
    assert found
    output, errors = folder / "out.jsonl", folder / "errors.jsonl"
    run(COMMAND, "-m", "openai_batch.run", "--resume", found[1], "-o", output, "-e", errors, *where)
    assert len(rows_in(output)) == len(CHATS)
    assert [row["response"]["status_code"] for row in rows_in(errors)] == [400]


@pytest.mark.parametrize(
    "requests",
    [CHATS, EMBEDDINGS, RERANKS, SCORES],
    ids=["chat", "embeddings", "rerank", "score"],
)
def test_the_library_submits_waits_and_downloads(
    api: Api, tmp_path: Path, requests: list[dict[str, Any]]
) -> None:
    """Every kind of file that it creates comes back with a successful row per request, in order."""
    library_flow(api, tmp_path, requests)


def test_a_base_url_may_end_in_a_slash(api: Api, tmp_path: Path) -> None:
    """Both spellings are common."""
    stdout = run(LIBRARY, "-c", FLOW, tmp_path, f"{api.url}/", api.key, json.dumps(EMBEDDINGS))
    assert json.loads(stdout.splitlines()[-1])[0] == "completed"


def test_the_command_runs_a_file(api: Api, tmp_path: Path) -> None:
    """It sends embeddings with the chat endpoint, as it always does."""
    given = requests_file(tmp_path / "in.jsonl", EMBEDDINGS, "/v1/embeddings")
    output = tmp_path / "out.jsonl"
    where = ("--base-url", api.url, "--api-key", api.key)
    stdout = run(COMMAND, "-m", "openai_batch.run", given, "-o", output, *where)
    assert "completed" in stdout
    assert [row["response"]["body"]["echo"]["input"] for row in rows_in(output)] == ["tide", "mill"]


def test_the_command_creates_and_another_one_resumes(api: Api, tmp_path: Path) -> None:
    """The first ends at once with the batch's id; the second waits and fetches both files."""
    create_and_resume(api, tmp_path)


def test_each_client_has_its_own_environment() -> None:
    """Each has the openai package that it requires, and none of our packages."""
    majors = {
        run(python, "-c", "import openai; print(openai.__version__)").split(".")[0]
        for python in (LIBRARY, COMMAND)
    }
    assert majors == {"2", "3"}
    assert run(LIBRARY, "-c", "import sys; print(sys.prefix)").strip() != sys.prefix
