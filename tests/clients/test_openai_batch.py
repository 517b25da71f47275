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
# By kind: the end of the base URL, and the requests.
FLOWS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "chat": ("", CHATS),
    "embeddings": ("", EMBEDDINGS),
    "rerank": ("", RERANKS),
    "score": ("", SCORES),
    "a slash": ("/", EMBEDDINGS),
}

FLOW = """
import json, sys
from openai_batch import Batch
from openai_batch.providers import Provider

key, flows = sys.argv[1:]
for folder, url, requests in json.loads(flows):
    with Batch(
        submission_input_file=f"{folder}/in.jsonl",
        output_file=f"{folder}/out.jsonl",
        error_file=f"{folder}/errors.jsonl",
        provider=Provider(base_url=url, api_key=key),
    ) as batch:
        for request in requests:
            batch.add_to_batch(**request)
        ended, output, errors = batch.submit_wait_download(interval=0.2)
    print("ended:", json.dumps([ended.status, output, errors]))
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


def library_flows(key: str, *flows: tuple[Path, str, list[dict[str, Any]]]) -> list[Any]:
    """Run requests through the library, one batch per folder and URL; return the end of each."""
    given = json.dumps([(str(folder), url, requests) for folder, url, requests in flows])
    lines = run(LIBRARY, "-c", FLOW, key, given).splitlines()
    return [
        json.loads(line.removeprefix("ended: ")) for line in lines if line.startswith("ended: ")
    ]


def library_flow(api: Api, folder: Path, requests: list[dict[str, Any]]) -> None:
    """Run requests through the library: each has a successful row, in order."""
    [printed] = library_flows(api.key, (folder, api.url, requests))
    check_flow(printed, folder, requests)


def check_flow(printed: Any, folder: Path, requests: list[dict[str, Any]]) -> None:
    """Check that each request has a successful row, in order."""
    output = folder / "out.jsonl"
    assert printed == ["completed", str(output), None]
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


@pytest.fixture(scope="module")
def ended(api: Api, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    """Run all kinds of requests in one process; return what it printed, and the folder, of each."""
    flows = [
        (tmp_path_factory.mktemp("flow"), f"{api.url}{end}", requests)
        for end, requests in FLOWS.values()
    ]
    printed = library_flows(api.key, *flows)
    folders = [folder for folder, _, _ in flows]
    return dict(zip(FLOWS, zip(printed, folders, strict=True), strict=True))


@pytest.mark.parametrize("kind", ["chat", "embeddings", "rerank", "score"])
def test_the_library_submits_waits_and_downloads(
    ended: dict[str, tuple[Any, Path]], kind: str
) -> None:
    """Every kind of file that it creates comes back with a successful row per request, in order."""
    check_flow(*ended[kind], FLOWS[kind][1])


def test_a_base_url_may_end_in_a_slash(ended: dict[str, tuple[Any, Path]]) -> None:
    """Both spellings are common."""
    check_flow(*ended["a slash"], FLOWS["a slash"][1])


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
    code = "import importlib.metadata as metadata; print(metadata.version('openai'))"
    majors = {run(python, "-c", code).split(".")[0] for python in (LIBRARY, COMMAND)}
    assert majors == {"2", "3"}
    assert run(LIBRARY, "-c", "import sys; print(sys.prefix)").strip() != sys.prefix
