"""The real stacks on an emulator: event source mappings, Lambdas, HTTP API, and a worker."""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from playwright.sync_api import expect
from pydantic_core import to_json

from infra.config import DEFAULT_PATH
from infra.ops.smoke import SmokeTest
from localstack import local
from localstack.emulator import Outage
from localstack.local import (
    CloudLost,
    LocalCloud,
    LocalOptions,
    WorkersBraked,
    create_key,
    running_cloud,
)
from localstack.ministack import environment_for
from localstack.stacks import client_options, deploy
from localstack.state_folder import StateRefused
from tests.handler.dashboard.browser import NO_CHROMIUM, find_chromium, running_chromium
from tests.localstack.conftest import replaced_workers
from tidemill.batch.fleet import CircuitBreaker
from tidemill.cli.commands.local import _guide
from tidemill.cli.main import main
from tidemill.handler.aws.calls import Operation, T
from tidemill.handler.aws.sync import Aws
from tidemill.handler.errors import AwsError
from tidemill.handler.fleet.circuit_breaker import close_breaker
from tidemill.handler.tenants.keys import KeyStore, key_id_of
from tidemill.sdk.engine import Engine

ROOT = Path(__file__).parents[2]
MODEL = "tidemill-demo"
EXAMPLE = (ROOT / "examples" / "demo.jsonl").read_bytes()
SECONDS = 600
NUM_UPGRADE_LINES = 800
SLOW = ("--max-num-seqs=1", "--max-inflight=1")


@pytest.fixture(scope="module")
def clients(cloud: LocalCloud) -> dict[str, Any]:
    """Return what boto3 clients of the cloud's emulator are made with."""
    return client_options(environment_for(cloud.endpoint_url))


def test_the_smoke_test_of_a_deployment_passes(cloud: LocalCloud) -> None:
    """Rows come back in order, a bad file fails with its line, a cancel keeps what is done."""
    with cloud.api() as api:
        visit = SmokeTest(api, cloud.drops, MODEL, SECONDS)
        sentences = list(visit.run())
        visit.clean_up()
    assert len(sentences) == 3
    assert (
        cloud.drops.s3.list_objects_v2(Bucket=cloud.outputs.bucket, Prefix="output/smoke").get(
            "Contents"
        )
        is None
    )


def test_the_example_file_is_answered_line_by_line(cloud: LocalCloud) -> None:
    """`make demo` shows this: each line has its row, in the order of the lines."""
    states: list[str] = []
    batch, rows = cloud.run_file(
        "example", EXAMPLE, seconds=SECONDS, show=lambda batch: states.append(batch["status"])
    )
    lines = [json.loads(line) for line in EXAMPLE.splitlines()]
    assert batch["status"] == states[-1] == "completed"
    assert [row["custom_id"] for row in rows] == [line["custom_id"] for line in lines]
    assert {row["response"]["status_code"] for row in rows} == {200}


def test_a_file_for_another_service_runs_as_it_is(cloud: LocalCloud) -> None:
    """Its lines ask for OpenAI's models, by a name and by `*`; each row shows its line's name."""
    names = ["gpt-4o-mini", "gpt-5", MODEL]
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions"}
        | {"body": {"model": name, "prompt": "The", "max_tokens": 2}}
        for name in names
    ]
    response = {"model": names[1], "input": "The", "max_output_tokens": 2}
    lines[1] |= {"url": "/v1/responses", "body": response}
    body = b"\n".join(json.dumps(line).encode() for line in lines)
    batch, rows = cloud.run_file("openai", body, seconds=SECONDS, show=lambda _: None)
    assert batch["model"] == MODEL
    assert [row["response"]["body"]["model"] for row in rows] == names


@pytest.mark.long  # who replaces it comes within a minute; tests of scaling kill one, too
def test_a_cloud_outlives_its_worker(cloud: LocalCloud) -> None:
    """Killed while it waits for work, it is replaced by another one when there is some."""
    cloud.run_file("before", EXAMPLE, seconds=SECONDS, show=lambda _: None)
    [(name, process)] = cloud.processes.processes.items()
    process.kill()
    assert cloud.wait_until_idle(SECONDS)
    deadline = time.monotonic() + SECONDS
    while not cloud.aws.run(cloud.deployment.fleets.get_state(MODEL)).ends:
        assert time.monotonic() < deadline, "its end is not counted"
        time.sleep(0.1)
    batch, rows = cloud.run_file("outlived", EXAMPLE, seconds=SECONDS, show=lambda _: None)
    assert (batch["status"], len(rows)) == ("completed", len(EXAMPLE.splitlines()))
    assert name not in cloud.processes.processes


def test_following_a_file_ends_when_no_worker_can_start(cloud: LocalCloud) -> None:
    """An open circuit breaker ends the wait, with its reason; another release's does not."""
    fleets, release = cloud.deployment.fleets, cloud.fleet.plans[MODEL].release

    def trip(release: str) -> None:
        why = CircuitBreaker(1, release, "crash_loop", "They die.", "Mend them.")
        cloud.aws.run(fleets.change(MODEL, lambda state: replace(state, breaker=why)))

    trip("another")
    cloud.check()
    trip(release)
    with pytest.raises(WorkersBraked, match=f"no more workers of {MODEL} are started: They die"):
        cloud.check()
    cloud.aws.run(fleets.change(MODEL, close_breaker))
    cloud.check()


def test_a_late_answer_ends_no_cloud(cloud: LocalCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is requested again; an emulator that stays silent is reported as gone."""
    notices: list[str] = []

    class Late(Aws):
        def run(self, operation: Operation[T]) -> T:
            operation.close()
            raise AwsError("dynamodb get_item: read timeout")

    silent = replace(cloud, aws=Late(), notify=notices.append, outage=Outage(), state=None)
    silent.supervise()
    silent.supervise()
    assert notices == ["the emulator is slow to reply: trying again"]
    replace(silent, aws=cloud.aws).supervise()
    assert silent.outage.since is None
    monkeypatch.setattr(local, "_MAX_SILENT_SECONDS", 0.0)
    with pytest.raises(CloudLost, match="it has not replied for 0 seconds"):
        silent.supervise()


def test_a_file_that_cannot_be_a_batch_has_no_rows(cloud: LocalCloud) -> None:
    """Its report has the reason, even for an unreadable line."""
    batch, rows = cloud.run_file("bad", b"{not json\n", seconds=SECONDS, show=lambda _: None)
    assert (batch["status"], rows) == ("failed", [])
    assert batch["errors"]["data"][0]["line"] == 1


def test_a_browser_has_a_file_run(cloud: LocalCloud, tmp_path: Path) -> None:
    """The page that the Lambda serves sends a file to the bucket and has its rows from there."""
    executable = find_chromium()
    if executable is None:
        pytest.skip(NO_CHROMIUM)
    file = tmp_path / "from-a-browser.jsonl"
    file.write_bytes(EXAMPLE)
    with running_chromium(executable) as browser:
        page = browser.new_page()
        page.set_default_timeout(120_000)
        page.goto(f"{cloud.page_url}#/new")
        page.get_by_label("API key").fill(cloud.key)
        page.get_by_role("button", name="Sign in").click()
        page.get_by_label("A JSONL file").set_input_files(file)
        page.get_by_role("button", name="Upload and start").click()
        expect(page.get_by_role("heading", name=file.name)).to_be_visible(timeout=120_000)
        expect(page.locator("#live .status")).to_have_text("Completed", timeout=SECONDS * 1000)
        with page.expect_download() as downloaded:
            page.get_by_role("button", name="Download output").click()
        rows = Path(downloaded.value.path()).read_bytes().splitlines()
    assert [json.loads(row)["custom_id"] for row in rows] == [
        json.loads(line)["custom_id"] for line in EXAMPLE.splitlines()
    ]


@pytest.mark.long
def test_a_batch_survives_an_upgrade_of_the_stacks(
    cloud: LocalCloud, clients: dict[str, Any], tmp_path: Path
) -> None:
    """A changed version is deployed while a batch runs, its worker replaced: no row is lost."""
    body = {"model": MODEL, "prompt": "The", "max_tokens": 150, "ignore_eos": True}
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions"}
        | {"body": body | {"seed": number}}
        for number in range(NUM_UPGRADE_LINES)
    ]
    config = tmp_path / "config.toml"
    config.write_text(DEFAULT_PATH.read_text().replace('default = "24h"', 'default = "12h"'))
    with cloud.api() as api:
        with replaced_workers(cloud, *SLOW):
            url = cloud.drops.drop(
                "upgrade", b"\n".join(json.dumps(line).encode() for line in lines)
            )
            api.follow(
                url, seconds=SECONDS, until=lambda batch: batch["request_counts"]["completed"]
            )
            environment = environment_for(cloud.endpoint_url)
            deploy(environment, tmp_path, config=config, name=cloud.outputs.name)
            seen = api.follow(url, seconds=SECONDS, until=lambda _: True)["status"]
        batch = api.follow(url, seconds=SECONDS)
    functions = boto3.client("lambda", **clients).list_functions()["Functions"]
    windows = {
        function["Environment"]["Variables"]["TIDEMILL_DEFAULT_WINDOW"] for function in functions
    }
    assert windows == {"12h"}
    assert seen == "in_progress", "the upgrade came too late to prove anything"
    assert batch["status"] == "completed"
    custom_ids = [row["custom_id"] for row in cloud.drops.rows("upgrade")]
    assert custom_ids == [line["custom_id"] for line in lines]


def test_the_commands_that_the_guide_prints_work(
    cloud: LocalCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tidemill local up` prints a submission and a drop, which are run and fetch their rows."""
    guide = _guide(cloud)
    for name, value in re.findall(r"(\b[A-Z_]+)=(\S+)", guide):
        monkeypatch.setenv(name, shlex.split(value)[0])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)
    [submit] = re.findall(r"tidemill (submit .*) --wait", guide)
    [drop] = re.findall(r"tidemill (drop .*)", guide)
    for command in (submit, drop):
        output, errors = (str(tmp_path / f"{command.split()[0]}.{kind}") for kind in ("out", "err"))
        assert main([*command.split(), "--wait", "-o", output, "-e", errors]) == 0
        rows = [json.loads(row) for row in Path(output).read_text().splitlines()]
        lines = [json.loads(line) for line in EXAMPLE.splitlines()]
        assert [row["custom_id"] for row in rows] == [line["custom_id"] for line in lines]
        assert not Path(errors).exists()


@pytest.mark.parametrize("authorization", [None, "Bearer tm_0", "Basic dXNlcjp4"])
def test_the_api_requires_a_key(cloud: LocalCloud, authorization: str | None) -> None:
    """A request without a key, or with an invalid one, is refused in OpenAI's format."""
    headers = {"Authorization": authorization} if authorization else {}
    response = httpx.get(f"{cloud.api_url}/v1/batches", headers=headers, timeout=60)
    assert response.status_code == 401
    assert response.json()["error"]["code"] in {"missing_api_key", "invalid_api_key"}


def test_the_openai_sdk_knows_a_wrong_key(cloud: LocalCloud) -> None:
    """It raises the exception that it raises for OpenAI's own."""
    import openai

    with (
        openai.OpenAI(base_url=f"{cloud.api_url}/v1", api_key="sk-none") as client,
        pytest.raises(openai.AuthenticationError, match="Invalid or revoked API key"),
    ):
        client.batches.list()


def test_a_revoked_key_opens_nothing(cloud: LocalCloud, clients: dict[str, Any]) -> None:
    """The revoked one of two keys is refused, though it was valid a moment ago."""
    kept, revoked = (create_key(clients, cloud.outputs, name=name) for name in ("kept", "revoked"))
    aws = Aws(lambda service, **options: boto3.client(service, **clients, **options))

    def status_with(token: str) -> int:
        headers = {"Authorization": f"Bearer {token}"}
        return httpx.get(f"{cloud.api_url}/v1/models", headers=headers, timeout=60).status_code

    assert status_with(revoked) == 200
    aws.run(KeyStore(cloud.outputs.table).revoke(key_id_of(revoked), now=1))
    assert [status_with(token) for token in (kept, revoked)] == [200, 401]


def test_the_program_of_the_guide_for_openai_runs(cloud: LocalCloud, tmp_path: Path) -> None:
    """The two variables of `local up` are enough; each line of the example gets its row."""
    page = (ROOT / "docs/guides/openai-batch.md").read_text(encoding="utf-8")
    [program] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "requests.jsonl").write_bytes(EXAMPLE)
    subprocess.run(
        [sys.executable, "-c", program],
        env={
            **os.environ,
            "OPENAI_BASE_URL": f"{cloud.api_url}/v1",
            "OPENAI_API_KEY": cloud.key,
        },
        cwd=tmp_path,
        timeout=SECONDS,
        check=True,
    )
    rows = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert [json.loads(row)["custom_id"] for row in rows] == [
        json.loads(line)["custom_id"] for line in EXAMPLE.splitlines()
    ]


def test_a_table_that_is_dropped_comes_back_as_one(cloud: LocalCloud, tmp_path: Path) -> None:
    """The guide's own command returns the columns of the table, followed by the answers."""
    page = (ROOT / "docs/guides/deploy-to-aws.md").read_text(encoding="utf-8")
    [command] = re.findall(r"^tidemill drop reviews.*$", page, re.MULTILINE)
    reviews = pa.table({"id": [7, 8], "review": ["The food was great.", "Never again."]})
    pq.write_table(reviews, tmp_path / "reviews.parquet")
    environment = environment_for(cloud.endpoint_url)
    variables = {**os.environ, **environment, "TIDEMILL_BUCKET": cloud.outputs.bucket}
    subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        env={**variables, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        timeout=SECONDS,
        check=True,
    )
    made = pq.read_table(tmp_path / "reviews.output.parquet")
    assert made.select(["id", "review"]).equals(reviews)
    assert all(made["text"].to_pylist())
    there = cloud.drops.read("output/reviews.parquet")
    assert there == (tmp_path / "reviews.output.parquet").read_bytes()


def test_a_table_is_run_with_the_recipe_next_to_it(
    cloud: LocalCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tidemill local run` has its flags before the recipe; -o sets the format."""
    monkeypatch.setattr("tidemill.cli.commands.local._local_cloud", lambda _: nullcontext(cloud))
    monkeypatch.setattr("tidemill.cli.commands.local._LAST_SECONDS", 0)
    monkeypatch.chdir(tmp_path)
    with gzip.open("reviews.csv.gz", "wt", encoding="utf-8") as file:
        file.write('id,review\na,"Good, and cheap"\nb,Never again\n')
    Path("reviews.recipe.toml").write_text("prompt = '{{ reviw }}'\nparams = {max_tokens = 4}\n")
    flags = ["--prompt", "Good or bad? {{ review }}", "--id", "id"]
    assert main(["local", "run", "-i", "reviews.csv.gz", *flags]) == 0
    [head, *rows] = csv.reader(Path("reviews.output.csv").read_text(encoding="utf-8").splitlines())
    assert head[:3] == ["id", "review", "text"]
    assert [row[:2] for row in rows] == [["a", "Good, and cheap"], ["b", "Never again"]]
    assert all(row[2] for row in rows)
    assert main(["local", "run", "-i", "reviews.csv.gz", *flags, "-o", "reviews.parquet"]) == 0
    assert pq.read_table("reviews.parquet")["text"].to_pylist() == [row[2] for row in rows]


def test_a_browser_is_shown_the_dashboard(cloud: LocalCloud) -> None:
    """`local up` prints an address whose host browsers resolve to this machine."""
    page = httpx.URL(cloud.page_url)
    assert page.host.endswith(".localhost")
    here = page.copy_with(host="127.0.0.1")
    response = httpx.get(here, headers={"Host": page.netloc.decode()}, timeout=60)
    assert response.status_code == 200
    assert "<title>Tidemill</title>" in response.text


def test_the_openai_sdk_lists_and_cancels(cloud: LocalCloud) -> None:
    """People's own clients find the batches of dropped files."""
    import openai

    cloud.run_file("listed", b"{not json\n", seconds=SECONDS, show=lambda _: None)
    with openai.OpenAI(base_url=f"{cloud.api_url}/v1", api_key=cloud.key) as client:
        batch = next(iter(client.batches.list(limit=1)))
        assert client.batches.retrieve(batch.id).id == batch.id
        with pytest.raises(openai.NotFoundError) as refused:
            client.batches.cancel("batch_none")
        assert refused.value.body["code"] == "batch_not_found"
        assert [model.id for model in client.models.list()] == [MODEL, "gpt-4o-mini"]


@pytest.mark.long
def test_a_cloud_resumes_with_its_saved_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart results are there, and a new drop is taken in by the Lambdas of before.

    Another cloud in the environment, as after what `local up` prints, is never called.
    """
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    buckets = set()
    for name in ("before", "after"):
        options = LocalOptions(config=DEFAULT_PATH, state=tmp_path / "kept")
        with running_cloud(options, lambda _: None) as cloud:
            buckets.add(cloud.outputs.bucket)
            batch, rows = cloud.run_file(name, EXAMPLE, seconds=SECONDS, show=lambda _: None)
            assert (batch["status"], len(rows)) == ("completed", len(EXAMPLE.splitlines()))
            assert cloud.drops.report("before") is not None
    assert len(buckets) == 1


def test_kept_state_stays_at_its_port(tmp_path: Path) -> None:
    """Addresses in it name the port: another one is refused, not used by half."""
    options = LocalOptions(config=DEFAULT_PATH, state=tmp_path, port=4566)
    (tmp_path / "port").write_text("4567")
    with (
        pytest.raises(StateRefused, match="was created for port 4567"),
        running_cloud(options, lambda _: None),
    ):
        pass


@pytest.mark.long  # each way has its own start of an engine
def test_rows_of_a_table_are_the_same_whichever_way_they_go(
    cloud: LocalCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is run as requests, CSV, Parquet and JSON, in Python, by `submit` and as a drop."""
    num_rows = int(os.environ.get("TIDEMILL_TABLE_ROWS", "200"))
    monkeypatch.chdir(tmp_path)
    words = ["food", "view", "room", "staff", "bed", "a, b", 'a "c"', "é\nü"]
    reviews = pa.table(
        {
            "id": [f"r{n}" for n in range(num_rows)],
            "review": [f"The {words[n % 8]} was {n % 97} of {n % 13}." for n in range(num_rows)],
        }
    )
    pq.write_table(reviews, "t.parquet", row_group_size=77)
    with Path("t.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(
            [reviews.schema.names, *zip(*reviews.to_pydict().values(), strict=True)]
        )
    rows = reviews.to_pylist()
    Path("t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    requests = [
        {
            "custom_id": row["id"],
            "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": f"Is it good? {row['review']}"}]}
            | {"max_tokens": 4},
        }
        for row in rows
    ]
    # A line's bytes seed what is sampled.
    Path("requests.jsonl").write_bytes(b"".join(to_json(line) + b"\n" for line in requests))
    recipe = "prompt = 'Is it good? {{ review }}'\nid = 'id'\nparams = {max_tokens = 4}\n"
    Path("t.recipe.toml").write_text(recipe, encoding="utf-8")
    environment = environment_for(cloud.endpoint_url) | {"PYTHONPATH": str(ROOT)}
    environment |= {"TIDEMILL_BASE_URL": cloud.api_url, "TIDEMILL_API_KEY": cloud.key}

    def typed(*words: str) -> None:
        command = [sys.executable, "-m", "tidemill", *words]
        subprocess.run(command, env=os.environ | environment, check=True)

    def texts(name: str) -> list[str]:
        found: list[str] = pq.read_table(name)["text"].to_pylist()
        return found

    typed("run", "-i", "requests.jsonl", "-o", "rows.jsonl", "--no-card")
    answers = [json.loads(row) for row in Path("rows.jsonl").read_bytes().splitlines()]
    expected = [one["response"]["body"]["choices"][0]["message"]["content"] for one in answers]
    assert len(set(expected)) > 1
    for ending in ("parquet", "csv", "jsonl"):
        typed("run", f"t.{ending}", "-o", f"of-{ending}.parquet", "--no-card")
        assert texts(f"of-{ending}.parquet") == expected
    typed("submit", "t.parquet", "--wait", "-o", "submitted.parquet")
    assert texts("submitted.parquet") == expected
    typed("drop", "t.parquet", "--bucket", cloud.outputs.bucket, "--wait", "-o", "dropped.parquet")
    assert texts("dropped.parquet") == expected
    with Engine() as engine:
        table = engine.answer_table(reviews, **tomllib.loads(recipe))
    assert table["text"].to_pylist() == expected


@pytest.mark.long  # each way has its own start of an engine
def test_decisions_over_a_dropped_table_are_those_of_a_run(
    cloud: LocalCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CSV is decided and calibrated by `tidemill run` and as a drop, with its recipe."""
    monkeypatch.chdir(tmp_path)
    tickets = [f"t{n},My lamp has been broken for {n} days." for n in range(2, 8)]
    Path("t.csv").write_text("\n".join(["id,ticket", *tickets, ""]))
    Path("t.recipe.toml").write_text(
        "id = 'id'\npermutations = 2\nask = ['damaged: Is something damaged?', "
        "'team = billing|shipping: Which team?', 'tone = calm<furious: How upset is it?']\n"
        "calibrate = 'batch'\nprior = 'even'\n"
    )
    environment = environment_for(cloud.endpoint_url) | {"PYTHONPATH": str(ROOT)}
    environment |= {"TIDEMILL_BASE_URL": cloud.api_url, "TIDEMILL_API_KEY": cloud.key}

    def typed(*words: str) -> None:
        command = [sys.executable, "-m", "tidemill", *words]
        subprocess.run(command, env=os.environ | environment, check=True)

    typed("run", "t.csv", "-o", "run.csv")
    typed("drop", "t.csv", "--bucket", cloud.outputs.bucket, "--wait", "-o", "dropped.csv")
    expected = _decided("run.csv")
    assert [*expected[0]][2:5] == ["damaged", "damaged_confidence", "damaged_probabilities"]
    for row, right in zip(_decided("dropped.csv"), expected, strict=True):
        assert row.keys() == right.keys()
        assert (row["id"], row["calibrated"], row["error"]) == (right["id"], "true", "")
        # Another batch rounds in another way.
        for question in ("damaged", "team", "tone"):
            column = f"{question}_probabilities"
            assert json.loads(row[column]) == pytest.approx(json.loads(right[column]), abs=0.02)


def _decided(name: str) -> list[dict[str, str]]:
    with Path(name).open(newline="") as file:
        return [*csv.DictReader(file)]
