"""`--model s3://…`: from objects in a bucket to rows, and what comes in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import pytest

from localstack.ministack import environment_for
from tests.emulators import Emulator
from tests.long_parameters import with_long
from tests.offline.given import Answer, rows
from tests.warm_start import read_at_import
from tidemill import demo
from tidemill.handler.aws.sync import Aws
from tidemill.handler.worker.weights.cache import DownloadProgress
from tidemill.handler.worker.weights.manifest import Location, find_weights
from tidemill.offline.console.errors import Refused
from tidemill.offline.engine.weights import (
    VARIABLE,
    _aws_in,
    local_model,
    log_progress,
    throttled,
)

ROOT = Path(__file__).parents[3]
LISTING = b"""<?xml version="1.0"?>
<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">
<Name>b</Name><Prefix>m/</Prefix><IsTruncated>false</IsTruncated>
<Contents><Key>m/config.json</Key><Size>2</Size><ETag>"c"</ETag></Contents>
<Contents><Key>m/model.safetensors</Key><Size>9</Size><ETag>"w"</ETag></Contents>
</ListBucketResult>"""
WORKER = ("worker", "--queue", "http://q", "--table", "t", "--bucket", "data-bucket")
RUN = ("run", "--any-model", "-i", "examples/demo.jsonl", "-o")
COMMAND = (sys.executable, "-m", "tidemill")
WORKER_FLAGS = (*WORKER, "--control-queue", "http://c")

_MAIN = "import sys; from tidemill.cli.main import main; sys.exit(main())"
# Credentials of the user are not read.
NO_FILES = dict.fromkeys(("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"), os.devnull)

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts `tidemill` with few environment variables, after some code."""
    started = []

    def begin(*arguments: object, code: str = "", **environment: str) -> Any:
        process = subprocess.Popen(
            [
                *((sys.executable, "-c", f"{code}\n{_MAIN}") if code else COMMAND),
                *map(str, arguments),
            ],
            cwd=ROOT,
            env=read_at_import(os.environ) | NO_FILES | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def location(ministack: Emulator) -> Location:
    """Return the location of the demo model in a bucket."""
    s3 = ministack.client("s3")
    location = Location(f"weights-{uuid4().hex[:10]}", "models/demo/")
    s3.create_bucket(Bucket=location.bucket)
    for path in demo.MODEL_PATH.iterdir():
        s3.put_object(
            Bucket=location.bucket, Key=location.prefix + path.name, Body=path.read_bytes()
        )
    return location


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the exit status and stderr of a process."""
    _, err = process.communicate(timeout=120)
    return process.returncode, err


def wait_for(is_done: Callable[[], bool]) -> None:
    """Return once it is done."""
    deadline = time.monotonic() + 120
    while not is_done():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_a_run_takes_its_model_from_s3(
    ministack: Emulator, location: Location, start: Start, tmp_path: Path
) -> None:
    """The run downloads it into the cache, prints a note, and uses the served model name."""
    files = ("-i", "examples/demo.jsonl", "-o", tmp_path / "out")
    model = ("--model", str(location).rstrip("/"), "--served-model-name", demo.NAME)
    cache = {VARIABLE: str(tmp_path / "cache")}
    status, err = ended(start("run", *files, *model, **ministack.environment, **cache))
    assert status == 0, err
    assert "tidemill: downloading the weights: " in err
    assert {row["response"]["status_code"] for row in rows(tmp_path / "out")} == {200}
    [folder] = (tmp_path / "cache").iterdir()
    revision = Aws(ministack.client).run(find_weights(location)).revision
    assert [path.name for path in (folder / "snapshots").iterdir()] == [revision]


@pytest.mark.parametrize("cache", [None, "cache"])
def test_weights_are_in_the_home_folder_unless_another_is_given(
    ministack: Emulator,
    location: Location,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cache: str | None,
) -> None:
    """The other folder is that of a variable."""
    monkeypatch.chdir(tmp_path)
    for name, value in ministack.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    if cache is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, cache)
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)
    with local_model(str(location), None, lambda _: None) as folder:
        used = tmp_path / (cache or "home/.cache/tidemill/weights")
        assert Path(folder).resolve().is_relative_to(used)
    assert (tmp_path / "home").exists() is (cache is None)


class CannotBeHad(NamedTuple):
    """A model, and what is made of it."""

    model: str
    status: int
    words: str


@pytest.mark.parametrize(
    "case",
    with_long(
        [CannotBeHad("s3://no-such-bucket-here/m", 1, "bucket no-such-bucket-here of s3://")],
        [CannotBeHad("s3:///m", 2, "s3:///m is not a weights URL: use s3://bucket/prefix")],
    ),
)
@pytest.mark.parametrize("command", [WORKER_FLAGS, RUN])
def test_weights_that_cannot_be_had_end_it_with_a_sentence(
    ministack: Emulator, start: Start, tmp_path: Path, case: CannotBeHad, command: Sequence[str]
) -> None:
    """It is printed without a traceback, before anything is written."""
    out = [tmp_path / "out"] if command[-1] == "-o" else []
    process = start(*command, *out, "--model", case.model, **ministack.environment)
    status, err = ended(process)
    assert status == case.status
    assert f"tidemill: {case.words}" in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_a_missing_library_is_named_with_what_installs_it(start: Start, tmp_path: Path) -> None:
    """A run needs the cloud's only for a model from there."""
    flags = (tmp_path / "out", "--model", "s3://b/m")
    status, err = ended(start(*RUN, *flags, code="import sys; sys.modules['boto3'] = None"))
    assert status == 1
    assert "tidemill: a run with s3://b/m needs boto3, which is not installed" in err
    assert err.endswith(f" -e '{ROOT}[engine,cloud]'\n")


def test_missing_credentials_are_reported(start: Start) -> None:
    """The error is the AWS client's."""
    no_credentials = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_REGION": "us-east-1"}
    status, err = ended(start(*WORKER_FLAGS, "--model", "s3://b/m", **no_credentials))
    words = "s3://b/m/ cannot be read: s3 head_bucket: Unable to locate credentials"
    assert (status, err) == (1, f"tidemill: {words}\n")


@pytest.mark.parametrize("number", with_long([signal.SIGTERM], [signal.SIGINT]))
def test_a_worker_that_is_stopped_while_it_fetches_ends_well(
    server: Any, start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    """With 0, without waiting for a network that is silent; it was alive until then."""
    server.will(Answer(body=LISTING), Answer(hang=True))
    health_file = tmp_path / "alive"
    process = start(
        *(*WORKER_FLAGS, "--model", "s3://b/m", "--health-file", health_file),
        *("--weights-cache", tmp_path / "cache"),
        TIDEMILL_CACHE="off",  # otherwise it also requests parity results
        **environment_for(server.url),
    )
    wait_for(lambda: len(server.received) == 3 and health_file.exists())
    process.send_signal(number)
    out, err = process.communicate(timeout=120)  # the server is silent for longer than that
    assert (process.returncode, err) == (0, "")
    assert '"message":"fetching weights"' in out
    assert '"total_bytes":11' in out
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_run_that_is_stopped_while_it_fetches_leaves_the_output_alone(
    server: Any, start: Start, tmp_path: Path
) -> None:
    """Its status is the signal's, as always."""
    server.will(Answer(body=LISTING), Answer(hang=True))
    process = start(
        *(*RUN, tmp_path / "out", "--model", "s3://b/m"),
        **{VARIABLE: str(tmp_path / "cache")},
        **environment_for(server.url),
    )
    wait_for(lambda: len(server.received) == 3)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143
    assert "tidemill: stopped by SIGTERM: nothing was written" in err
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("region", "host"),
    [("", "s3.eu-west-1.amazonaws.com"), ("us-west-2", "s3.dualstack.us-west-2.amazonaws.com")],
)
def test_weights_of_another_region_are_reached_by_both_kinds_of_addresses(
    monkeypatch: pytest.MonkeyPatch, region: str, host: str
) -> None:
    """There is a gateway to S3 of the own region only, and a worker may have no other IPv4."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    # As the workers of a public network have it: infra/compute/network.py.
    monkeypatch.setenv("AWS_ENDPOINT_URL_SQS", "https://sqs.eu-west-1.api.aws")
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)
    assert _aws_in(region).clients["s3"].meta.endpoint_url == f"https://{host}"


@pytest.mark.parametrize("model", ["folder", "org/name", "/abs/folder"])
def test_a_model_that_is_not_in_s3_stays_what_it_is(model: str) -> None:
    """Nothing is downloaded, and no progress is reported."""

    def watch(_: DownloadProgress) -> None:
        raise AssertionError

    with local_model(model, None, watch) as found:
        assert found == model


def test_an_address_without_a_bucket_is_refused() -> None:
    """It is refused before any AWS call."""
    with pytest.raises(Refused, match="is not a weights URL"), local_model("s3://", None, print):
        pass


def test_progress_is_reported_at_once_and_then_rarely(capsys: pytest.CaptureFixture[str]) -> None:
    """The text is readable."""
    reports: list[DownloadProgress] = []
    watch = throttled(reports.append)
    watch(DownloadProgress(1, 2))
    watch(DownloadProgress(2, 2))
    assert reports == [DownloadProgress(1, 2)]
    log_progress(DownloadProgress(1_500_000_000, 16_060_000_000))
    log_progress(DownloadProgress(is_waiting=True))
    assert capsys.readouterr().err.splitlines() == [
        "tidemill: downloading the weights: 1.5 GB of 16.1 GB",
        "tidemill: waiting for another process that is downloading the weights",
    ]
