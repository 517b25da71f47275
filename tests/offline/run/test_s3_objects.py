"""Runs of `s3://` objects in an S3-compatible store, and stores that are set up wrongly."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.offline.conftest import Runner
from tests.offline.given import Answer, line, rows
from tests.strict_store import StrictStore
from tidemill.demo import MODEL_PATH
from tidemill.offline.console.errors import (
    CliError,
    InputChanged,
    Refused,
    TransferFailed,
)
from tidemill.offline.engine.weights import local_model
from tidemill.offline.files import s3_transfer
from tidemill.offline.files.s3_object import S3Object

LINES = "".join(f"{line(f'c{number}', say='ä' * number)}\n" for number in range(40)).encode()
ONE_TRY = {"retries": {"total_max_attempts": 1}}


@pytest.fixture
def at_store(store: StrictStore, monkeypatch: pytest.MonkeyPatch) -> StrictStore:
    """Let this process use the store, and nothing else of AWS."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)
    return store


def without_time(data: bytes) -> list[Any]:
    """Return rows without the time stamps of their input."""
    found = [json.loads(row) for row in data.splitlines()]
    for row in found:
        row["response"]["body"].pop("created", None)
    return found


def test_an_object_is_run_into_another(at_store: StrictStore, run: Runner, tmp_path: Path) -> None:
    """By the rows that a file gives, with nothing that such stores refuse."""
    source, local = at_store.put("in/a b+ü.jsonl", LINES), tmp_path / "in.jsonl"
    local.write_bytes(LINES)
    assert run("-i", source, "-o", f"s3://{at_store.bucket}/out/rows.jsonl") == 0
    assert run("-i", local, "-o", tmp_path / "out.jsonl") == 0
    written = at_store.get("out/rows.jsonl")
    assert without_time(written) == without_time((tmp_path / "out.jsonl").read_bytes())
    assert at_store.refused == []


def test_a_second_run_of_an_object_gives_the_same_bytes(
    at_store: StrictStore, run: Runner, tmp_path: Path
) -> None:
    """Rows have the time at which the object was written."""
    source, twice = at_store.put("in.jsonl", LINES), []
    for name in ("one", "two"):
        assert run("-i", source, "-o", tmp_path / name) == 0
        twice.append((tmp_path / name).read_bytes())
    assert twice[0] == twice[1]


def test_an_object_is_written_over_only_by_force(at_store: StrictStore, run: Runner) -> None:
    """The run ends before a model is loaded, as with a file."""
    source, target = at_store.put("in.jsonl", LINES), at_store.put("rows.jsonl", b"mine")
    with pytest.raises(Refused, match=f"{target} already exists"):
        run("-i", source, "-o", target)
    assert run.engine is None
    assert at_store.get("rows.jsonl") == b"mine"
    assert run("-i", source, "-o", target, "--force") == 0
    assert len(at_store.get("rows.jsonl").splitlines()) == 40


def test_a_large_output_is_written_in_parts(
    at_store: StrictStore, run: Runner, write_input: Callable[..., Path]
) -> None:
    """None of which has a checksum that the store refuses."""
    path = write_input(*(line(f"c{number}", say="x" * 2**20) for number in range(9)))
    assert run("-i", path, "-o", f"s3://{at_store.bucket}/rows") == 0
    assert sum("partNumber=" in served for served in at_store.served) >= 2
    assert len(at_store.get("rows").splitlines()) == 9
    assert at_store.refused == []


@pytest.mark.parametrize("lacks", [[], ["?delete"]])
def test_results_are_kept_and_trimmed_in_the_store(
    at_store: StrictStore, run: Runner, tmp_path: Path, lacks: list[str]
) -> None:
    """By one call, with a checksum that all stores know; one by one where a store has no such."""
    at_store.lacks.extend(lacks)
    source = at_store.put("in.jsonl", f"{line('c', temperature=0)}\n".encode())
    kept = ("--reuse", f"s3://{at_store.bucket}/kept", "--reuse-max-size", "1")
    model = ("--model", MODEL_PATH, "--any-model")
    assert run("-i", source, "-o", tmp_path / "rows.jsonl", *kept, *model) == 0
    assert any(served.endswith("?delete") for served in at_store.served) is not bool(lacks)
    assert at_store.refused == ["NotImplemented"] * len(lacks)
    assert at_store.emulator.client("s3").list_objects_v2(Bucket=at_store.bucket)["KeyCount"] == 1


def test_weights_of_a_store_have_no_region(at_store: StrictStore, tmp_path: Path) -> None:
    """A worker takes them, wherever it runs."""
    for path in MODEL_PATH.iterdir():
        at_store.put(f"m/{path.name}", path.read_bytes())
    with local_model(f"s3://{at_store.bucket}/m", str(tmp_path), lambda _: None, "") as folder:
        for path in Path(folder).iterdir():
            assert path.read_bytes() == (MODEL_PATH / path.name).read_bytes()
    assert at_store.refused == []


def test_an_empty_object_has_no_lines(at_store: StrictStore, run: Runner, tmp_path: Path) -> None:
    """Like an empty file, it is not an error."""
    assert run("-i", at_store.put("in.jsonl", b""), "-o", tmp_path / "rows.jsonl") == 0


def test_an_object_that_is_written_meanwhile_is_not_run(
    at_store: StrictStore, run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parts would be of two versions."""
    source, download = at_store.put("in.jsonl", LINES), s3_transfer.download

    def write_first(*arguments: Any) -> None:
        at_store.put("in.jsonl", LINES + LINES)
        download(*arguments)

    monkeypatch.setattr(s3_transfer, "download", write_first)
    with pytest.raises(InputChanged, match="the object changed in the meantime"):
        run("-i", source, "-o", tmp_path / "rows.jsonl")


def test_rows_that_cannot_be_written_are_kept(
    at_store: StrictStore,
    run: Runner,
    tmp_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The message names their file."""
    source, upload = at_store.put("in.jsonl", LINES), s3_transfer.upload_object

    def lock_out(place: S3Object, file: Any) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "former")
        monkeypatch.setattr("boto3.DEFAULT_SESSION", None)
        upload(place, file)

    monkeypatch.setattr(s3_transfer, "upload_object", lock_out)
    target = f"s3://{at_store.bucket}/rows"
    with pytest.raises(TransferFailed, match="The rows are in") as caught:
        run("-i", source, "-o", target, "--output-tmp-dir", tmp_dir)
    assert f"writing {target} failed: s3 put_object: " in str(caught.value)
    [kept] = tmp_dir.glob("*.jsonl")
    assert len(rows(kept)) == 40


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"AWS_ACCESS_KEY_ID": "another"}, "its keys or its region differ"),
        ({"AWS_REGION": "eu-west-1"}, "its keys or its region differ"),
        (
            {"AWS_ENDPOINT_URL_S3": "minio:9000"},
            "Invalid endpoint: minio:9000 (write http(s)://host",
        ),
        ({"AWS_ENDPOINT_URL_S3": "http://localhost:1"}, "localhost:1: it does not respond"),
        ({"TIDEMILL_STORE_PROFILE": "unknown"}, "profile (unknown) could not be found"),
    ],
)
def test_a_misconfigured_store_is_reported_before_a_model_is_loaded(
    at_store: StrictStore,
    run: Runner,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str],
    words: str,
) -> None:
    """By the store's own words, and what they mean."""
    source = at_store.put("in.jsonl", LINES)
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)
    monkeypatch.setattr("tidemill.handler.aws.calls._CLIENT_OPTIONS", ONE_TRY)
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CliError) as caught:
        run("-i", source, "-o", f"s3://{at_store.bucket}/rows")
    assert words in str(caught.value)
    assert run.engine is None


def test_a_missing_bucket_is_reported(at_store: StrictStore, run: Runner) -> None:
    """The bucket may be the input's or the output's."""
    source, other = at_store.put("in.jsonl", LINES), "s3://no-such-bucket-here/rows"
    for names in (("-i", source, "-o", other), ("-i", other, "-o", source)):
        with pytest.raises(CliError, match="it has no such bucket"):
            run(*names, "--force")
    with pytest.raises(Refused, match=f"the input {source}x does not exist"):
        run("-i", f"{source}x", "-o", f"s3://{at_store.bucket}/rows")


def test_the_addressing_style_is_reported_if_it_may_be_wrong(
    at_store: StrictStore, run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile may configure virtual-hosted addresses."""
    source = at_store.put("in.jsonl", LINES)
    (tmp_path / "config").write_text("[default]\ns3 =\n  addressing_style = virtual\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)
    monkeypatch.setattr("tidemill.handler.aws.calls._CLIENT_OPTIONS", ONE_TRY)
    with pytest.raises(TransferFailed, match="addressing_style = virtual puts the bucket into"):
        run("-i", source, "-o", tmp_path / "rows")


@pytest.mark.parametrize("names", [("s3://b/in", "rows"), ("in.jsonl", "s3://b/rows")])
def test_an_object_needs_an_extra(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, str]
) -> None:
    """The error names it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_bytes(LINES)
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(CliError, match=r"s3://b/\w+ needs boto3, which is not installed"):
        run("-i", names[0], "-o", names[1])


def test_a_web_page_is_not_a_store(
    at_store: StrictStore, run: Runner, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port of a console also answers every request."""
    server.will(Answer(body=b"<html><body><p>Sign in</body></html>"))
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
    monkeypatch.setattr("tidemill.handler.aws.calls._CLIENT_OPTIONS", ONE_TRY)
    with pytest.raises(TransferFailed, match="is not S3; it may be a console or another port"):
        run("-i", "s3://b/k", "-o", f"s3://{at_store.bucket}/rows")
    with (
        pytest.raises(CliError, match="belongs to another server, such as a console"),
        local_model("s3://b/m", None, lambda _: None),
    ):
        pass
