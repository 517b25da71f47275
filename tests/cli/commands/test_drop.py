"""`tidemill drop`, typed, against a bucket on an emulator."""

from __future__ import annotations

import gzip
import json
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cli.api_rig import Shell, line, shell_in
from tests.cli.fake_api import KEY, row_of
from tests.emulators import Emulator
from tidemill.batch.batch_request import parse_options

LINES = [line("a"), line("b"), line("c")]


@pytest.fixture
def shell(
    ministack: Emulator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Iterator[Shell]:
    """Return a shell with the credentials of an account, in which no server is named."""
    for name, value in ministack.environment.items():
        monkeypatch.setenv(name, value)
    with shell_in(tmp_path, monkeypatch, capfd) as found:
        monkeypatch.delenv("TIDEMILL_BASE_URL")
        monkeypatch.delenv("TIDEMILL_API_KEY")
        monkeypatch.delenv("TIDEMILL_BUCKET", raising=False)
        yield found


@pytest.fixture
def bucket(ministack: Emulator) -> str:
    """Return the bucket of a separate deployment."""
    return ministack.create().bucket


@pytest.fixture
def s3(ministack: Emulator) -> Any:
    """Return a client of the account."""
    return ministack.client("s3")


def put_results(s3: Any, bucket: str, name: str, report: dict[str, Any]) -> None:
    """Do what finalize does: rows first, the report last."""
    good, bad = LINES[:2], LINES[2:]
    for suffix, lines in ((".jsonl", good), (".errors.jsonl", bad)):
        body = b"".join(row_of(one) for one in lines)
        s3.put_object(Bucket=bucket, Key=f"output/{name}{suffix}", Body=body)
    s3.put_object(Bucket=bucket, Key=f"output/{name}.batch.json", Body=json.dumps(report).encode())


def report_of(status: str = "completed", **fields: Any) -> dict[str, Any]:
    """Return a report of a batch of three lines, the last of them bad."""
    counts = {"total": 3, "completed": 2, "failed": 1}
    found = {"id": "batch_1", "status": status, "request_counts": counts, "created_at": 4e9}
    return found | {"output_file_id": "file-o", "error_file_id": "file-e"} | fields


def at_first_pause(monkeypatch: pytest.MonkeyPatch, *acts: Callable[[], object]) -> None:
    """Let things happen while a command waits, one each time; it waits no further than that."""
    left = iter(acts)
    monkeypatch.setattr("tidemill.offline.console.backoff.sleep", lambda _: next(left)())


def test_a_file_and_its_options_are_put_where_intake_looks(
    shell: Shell, bucket: str, s3: Any
) -> None:
    """The object has the file's name; text that is not ASCII arrives unchanged."""
    file = shell.file(*LINES, name="questions.jsonl")
    result = shell.type(
        *("drop", file, "--bucket", bucket, "--window", "2h", "--metadata", "team=Küche"),
        *(
            "--on-invalid-line",
            "skip",
            "--strict-parameters",
            "--echo-fields",
            "label,metadata",
            "--output-url",
            "https://x.example/?a=b",
        ),
    )
    assert (result.status, result.out) == (0, f"s3://{bucket}/input/questions.jsonl\n")
    found = s3.get_object(Bucket=bucket, Key="input/questions.jsonl")
    assert found["Body"].read() == Path(file).read_bytes()
    options = parse_options(found["Metadata"])
    assert options.completion_window == "2h"
    assert options.echo_fields == ("label", "metadata")
    assert (options.on_invalid_line, options.strict_parameters) == ("skip", True)
    assert options.output_url == "https://x.example/?a=b"
    assert options.metadata["team"] == "Küche"


def test_a_large_file_is_put_in_parts(shell: Shell, bucket: str, s3: Any) -> None:
    """Byte for byte."""
    file = shell.file(*(line(str(number), pad="x" * 2**20) for number in range(20)))
    assert shell.type("drop", file, "--bucket", bucket, "--name", "team/x").status == 0
    found = s3.get_object(Bucket=bucket, Key="input/team/x.jsonl")
    assert found["Body"].read() == Path(file).read_bytes()
    assert found["ETag"].strip('"').endswith("-3")


def test_waiting_ends_with_the_report_and_the_rows(
    shell: Shell, bucket: str, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report of an earlier drop of that name does not count, nor that its cancelling left."""
    put_results(s3, bucket, "in", report_of("failed"))
    at_first_pause(
        monkeypatch,
        lambda: put_results(s3, bucket, "in", report_of("cancelled", created_at=2)),
        lambda: put_results(s3, bucket, "in", report_of()),
    )
    monkeypatch.setenv("TIDEMILL_BUCKET", bucket)
    result = shell.type("drop", shell.file(*LINES), "--wait", "--json")
    assert result.status == 3
    assert Path("in.output.jsonl").read_bytes() == row_of(LINES[0]) + row_of(LINES[1])
    assert Path("in.errors.jsonl").read_bytes() == row_of(LINES[2])
    assert result.values[-1]["status"] == "completed"
    assert result.values[-1]["saved"] == {
        "output": str(shell.folder / "in.output.jsonl"),
        "errors": str(shell.folder / "in.errors.jsonl"),
    }


def test_the_api_shows_the_progress_of_a_drop(
    shell: Shell, bucket: str, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an API, neither an older batch of that file nor one that has ended is shown."""
    monkeypatch.setenv("TIDEMILL_BASE_URL", shell.api.url)
    monkeypatch.setenv("TIDEMILL_API_KEY", KEY)
    url, flags = f"s3://{bucket}/input/in.jsonl", {"endpoint": "e", "completion_window": "24h"}
    shell.api.files[url] = b'{"body": {}}\n' * 3

    def make(**fields: Any) -> None:
        shell.api.make_batch(flags | {"input_file_id": url}, None).update(fields)

    def act() -> None:
        make(created_at=4e9)
        make(created_at=4e9, status="cancelled")
        make(created_at=2)

    at_first_pause(monkeypatch, act, lambda: put_results(s3, bucket, "in", report_of()))
    result = shell.type("drop", shell.file(*LINES), "--bucket", bucket, "--wait")
    assert result.status == 3
    assert "tidemill: in_progress, 0 of 3 rows" in result.err
    assert [batch["status"] for batch in shell.api.batches.values()] == [
        "in_progress",
        "cancelled",
        "validating",
    ]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"TIDEMILL_API_KEY": "tm_wrong"}, "rejected the API key"),
        ({"TIDEMILL_API_KEY": ""}, "requires an API key"),
        ({"TIDEMILL_BASE_URL": ""}, "to see the batch's progress here"),
    ],
)
def test_waiting_for_a_drop_needs_no_api(
    shell: Shell,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, str],
    words: str,
) -> None:
    """The reason why progress cannot be shown is logged once."""
    for name, value in ({"TIDEMILL_BASE_URL": shell.api.url} | settings).items():
        monkeypatch.setenv(name, value)
    s3 = boto3.client("s3")
    at_first_pause(
        monkeypatch, lambda: None, lambda: put_results(s3, bucket, "in", report_of("completed"))
    )
    result = shell.type("drop", shell.file(*LINES), "--bucket", bucket, "--wait")
    assert result.status == 3
    assert result.err.count(words) == 1


def test_a_bad_file_is_not_dropped(shell: Shell, bucket: str, s3: Any) -> None:
    """Its lines are named."""
    result = shell.type("drop", shell.file(line("a"), {"custom_id": "b"}), "--bucket", bucket)
    assert (result.status, result.out) == (1, "")
    assert "line 2: `url` is required" in result.err
    assert "Contents" not in s3.list_objects_v2(Bucket=bucket)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--bucket", "b", "--name", "x.errors"], 2, "is not a valid name for a drop"),
        (["--bucket", "b", "--name", "a\nb"], 2, "is not a valid name for a drop"),
        (["--bucket", "b", "--name", "x" * 1100], 2, "is not a valid name for a drop"),
        (["--bucket", "b", "--metadata", "Output-Url=x"], 2, "pass it as --output-url"),
        (["--bucket", "b", "--metadata", "completion-window=2h"], 2, "pass it as --window"),
        (["--bucket", "b", "--metadata", "a b=x"], 2, "is not a valid metadata key"),
        (["--bucket", "b", *(f"--metadata=k{n}={'x' * 500}" for n in range(5))], 2, "2,048 bytes"),
        (["--bucket", "none-there"], 1, "NoSuchBucket"),
        (["--deployment", "none"], 2, "or --bucket with the bucket's name"),
    ],
)
def test_an_invalid_drop_is_reported_in_one_sentence(
    shell: Shell, arguments: list[str], status: int, words: str
) -> None:
    """Nothing is printed on standard output."""
    result = shell.type("drop", shell.file(*LINES), *arguments)
    assert (result.status, result.out) == (status, "")
    assert words in result.err


@pytest.mark.parametrize(("file", "words"), [(".", ". is a directory"), ("", "file name is empty")])
def test_anything_but_a_file_is_refused(shell: Shell, file: str, words: str) -> None:
    """An explicit name does not change that."""
    result = shell.type("drop", file, "--bucket", "b", "--name", "x", "--wait")
    assert result.status == 2
    assert words in result.err


@pytest.mark.parametrize(
    ("setting", "status", "words"),
    [
        ("AWS_ENDPOINT_URL=http://127.0.0.1:1", 7, "Could not connect"),
        ("AWS_ENDPOINT_URL=x", 2, "the AWS settings are not valid: Invalid endpoint: x"),
        ("AWS_PROFILE=x", 2, "the AWS settings are not valid: The config profile (x)"),
        ("AWS_DEFAULT_REGION=a b", 2, "the AWS settings are not valid: Provided region_name"),
    ],
)
def test_settings_of_aws_that_cannot_work_are_a_sentence(
    shell: Shell,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    status: int,
    words: str,
) -> None:
    """The first call may be to any service."""
    for other in ("AWS_REGION", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(other)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    name, _, value = setting.partition("=")
    monkeypatch.setenv(name, value)
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)
    for where in ("--bucket", "--deployment"):
        result = shell.type("drop", shell.file(*LINES), where, "b")
        assert (result.status, result.out) == (status, "")
        assert words in result.err


def test_missing_credentials_are_reported(
    shell: Shell, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit status is that of a rejected key."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)
    result = shell.type("drop", shell.file(*LINES), "--bucket", bucket)
    assert result.status == 8
    assert "needs AWS credentials" in result.err


@pytest.mark.parametrize(
    ("typed", "key"),
    [
        ("in.jsonl.gz", "in.jsonl.gz"),
        ("in.JSON", "in.JSON"),
        ("in.txt", "in.txt.json.gz"),
        ("in.gz --name x", "x.json.gz"),
    ],
)
def test_a_file_in_another_form_is_dropped_as_it_is(
    typed: str, key: str, shell: Shell, bucket: str, s3: Any
) -> None:
    """The name gets the format's suffix; the elements are checked first."""
    content = gzip.compress(json.dumps(LINES).encode())
    name, *flags = typed.split()
    Path(name).write_bytes(content)
    result = shell.type("drop", name, "--bucket", bucket, "--json", *flags)
    report = {"report": f"output/{key}.batch.json"}
    assert result.values == [{"object": "drop", "url": f"s3://{bucket}/input/{key}"} | report]
    assert s3.get_object(Bucket=bucket, Key=f"input/{key}")["Body"].read() == content
    Path(name).write_bytes(b"a,b\n1,2\n")
    refused = shell.type("drop", name, "--bucket", bucket, *flags)
    assert (refused.status, refused.out) == (1, "")
    assert "This looks like CSV: define a request for each row" in refused.err


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    """Return a table."""
    path = tmp_path / "reviews.parquet"
    pq.write_table(pa.table({"id": ["a", "b"], "text": ["good", "bad \x7f"]}), path)
    return path


def test_a_table_is_put_behind_its_recipe(
    shell: Shell, bucket: str, s3: Any, reviews: Path
) -> None:
    """The table is unchanged, and recipe file and flags are merged."""
    recipe = (
        "prompt = 'x'\nid = 'id'\nparams = {stop = [\"\\n\", \"é\"], temperature = 0.5, n = 1}\n"
    )
    (reviews.parent / "reviews.recipe.toml").write_text(recipe, encoding="utf-8")
    prompt = 'Label "{{ text }}"\n\x7f'
    result = shell.type(
        "drop", str(reviews), "--bucket", bucket, "--prompt", prompt, "--keep", "id"
    )
    assert (result.status, result.out) == (0, f"s3://{bucket}/input/reviews.parquet\n")
    assert s3.get_object(Bucket=bucket, Key="input/reviews.parquet")["Body"].read() == (
        reviews.read_bytes()
    )
    put = s3.get_object(Bucket=bucket, Key="input/reviews.recipe.toml")["Body"].read()
    assert tomllib.loads(put.decode()) == {
        "prompt": prompt,
        "id": "id",
        "keep": ["id"],
        "output": "parquet",
        "params": {"stop": ["\n", "é"], "temperature": 0.5, "n": 1},
    }


def test_waiting_for_a_table_fetches_it(
    shell: Shell, bucket: str, s3: Any, reviews: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the format of its name; where none could be made, the rows that it would have had."""
    key = "output/reviews.csv"
    s3.put_object(Bucket=bucket, Key=key, Body=b"id\na\n")
    made = report_of(tidemill={"table_url": f"s3://{bucket}/{key}"})
    none = report_of(errors={"data": [{"message": "The table could not be made: x."}]})
    for report, output, words in (
        (made, ["out.csv"], f"its table is at s3://{bucket}/{key}"),
        (none, ["out.csv.rows.jsonl", "out.csv.errors.jsonl"], "could not be made"),
    ):
        at_first_pause(monkeypatch, partial(put_results, s3, bucket, "reviews.parquet", report))
        flags = ("--bucket", bucket, "--prompt", "{{ text }}", "--wait", "-o", "out.csv")
        result = shell.type("drop", str(reviews), *flags)
        assert result.status == 3
        assert words in result.err
        recipe = s3.get_object(Bucket=bucket, Key="input/reviews.recipe.toml")["Body"].read()
        assert tomllib.loads(recipe.decode())["output"] == "csv"
        assert sorted(path.name for path in shell.folder.glob("out*")) == sorted(output)
        for name in output:
            Path(name).unlink()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--prompt", "{{ txet }}"], "did you mean `text`?"),
        (["--prompt", "{{ text }}", "-o", "x.parquet"], "-o requires --wait"),
        (
            ["--recipe", "dates.toml"],
            "dates.toml is not valid: it contains a date or time",
        ),
        ([], "The file is a Parquet table: define a request for each row"),
    ],
)
def test_a_table_that_cannot_be_run_is_not_dropped(  # noqa: PLR0917 - fixtures
    shell: Shell, bucket: str, s3: Any, reviews: Path, flags: list[str], words: str
) -> None:
    """Its recipe is not uploaded either."""
    Path("dates.toml").write_text("prompt = '{{ text }}'\nparams = {at = 2026-01-01}\n")
    result = shell.type("drop", str(reviews), "--bucket", bucket, *flags)
    assert (result.status in {1, 2}, result.out) == (True, "")
    assert words in result.err
    assert "Contents" not in s3.list_objects_v2(Bucket=bucket)
