"""The image's entry point as a container starts it, with the libraries that the image has."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

from localstack.cloud import Cloud
from localstack.resources import create_resources
from tests.container.dockerfile import ROOT, Image, volumes
from tests.emulators import Emulator
from tests.engine.kernels.triton import launched
from tests.engine.kernels.triton.test_driver import BODY
from tidemill import demo
from tidemill.engine.kernels.triton.driver import make_stub_library
from tidemill.handler.aws.sync import Aws
from tidemill.handler.worker.weights.manifest import Location, find_weights

# The image's own environment is built for this: torch and all that it needs.
pytestmark = pytest.mark.long

# What the CUDA build of torch brings, in versions that it names itself.
CUDA = re.compile(r"cuda-.*|nvidia-.*|triton")


@dataclass
class Container:
    """Starts what a container runs: from `/`, with the image's environment and what is given."""

    image: Image
    environment: Mapping[str, str]
    log: Path

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Start the entry point with these words."""
        with self.log.open("wb") as log:
            return subprocess.Popen(
                self.image.command(*words),
                cwd="/",
                env={**self.image.environment, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def output(self, *command: str) -> tuple[int, str]:
        """Return the exit status of a command in the container, and what it wrote."""
        done = subprocess.run(
            command,
            cwd="/",
            env={**self.image.environment, **self.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout

    @property
    def health(self) -> tuple[int, str]:
        """Return what the image's check says."""
        return self.output(*self.image.health_check)


@pytest.fixture
def weights(ministack: Emulator) -> Location:
    """Return the location of the demo model in a bucket of weights."""
    s3 = ministack.client("s3")
    location = Location(f"weights-{uuid4().hex[:10]}", "demo/")
    s3.create_bucket(Bucket=location.bucket)
    for path in demo.MODEL_PATH.iterdir():
        s3.put_object(
            Bucket=location.bucket, Key=location.prefix + path.name, Body=path.read_bytes()
        )
    return location


@pytest.fixture
def cloud(ministack: Emulator, tmp_path: Path) -> Iterator[Cloud]:
    """A deployment with handlers and without a worker."""
    resources = create_resources(
        ministack.endpoint_url, prefix=f"image-{uuid4().hex[:10]}", models=[demo.NAME]
    )
    quick = {"TIDEMILL_WAIT_SECONDS": "1"}
    with Cloud(resources, ministack.environment | quick, tmp_path) as found:
        found.start_lambdas("--reaper-seconds", "1")
        yield found


def locked() -> dict[str, str]:
    """Return the versions of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = (line.split("==") for line in lines if not line.startswith("#"))
    return dict(pins)


def outside_volumes(image: Image) -> dict[str, tuple[int, int]]:
    """Return size and time of every file that a read-only root would hold."""
    writable = [image.path(volume) for volume in volumes()]
    return {
        str(path): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in image.root.rglob("*")
        if not any(path.is_relative_to(volume) for volume in writable)
    }


def test_the_libraries_are_those_of_the_lock(image: Image) -> None:
    """The versions are the lock's; nothing else is installed, not even pip."""
    [site] = image.path("/opt/libraries").glob("lib/python*/site-packages")
    installed = {
        re.sub(r"[-_.]+", "-", it.name).lower(): it.version.partition("+")[0]  # 2.13.0+cpu
        for it in metadata.distributions(path=[str(site)])
    }
    ours = {name: version for name, version in installed.items() if not CUDA.fullmatch(name)}
    assert {"aiobotocore", "boto3", "torch", "transformers"} <= ours.keys()
    assert ours.items() <= locked().items()
    assert "pip" not in installed
    for name in ("boto3", "torch", "transformers"):
        [code] = (site / name / "__pycache__").glob("__init__.*.pyc")
        assert code.read_bytes()[4:8] == b"\x01\0\0\0"  # by a hash that is not checked
    assert [it.name for it in metadata.distributions(path=[str(image.path("/opt/tidemill"))])] == [
        "tidemill"
    ]


def test_a_dropped_file_becomes_rows(
    image: Image, ministack: Emulator, weights: Location, cloud: Cloud, tmp_path: Path
) -> None:
    """Its weights come from S3; the worker stays healthy, and writes to its volumes only."""
    before = outside_volumes(image)
    container = Container(
        image,
        {**ministack.environment, **cloud.resources.environment, "TIDEMILL_WAIT_SECONDS": "1"},
        tmp_path / "log",
    )
    assert container.health[0] == 1
    worker = container.start(*("worker", "--model", str(weights), "--served-model-name", demo.NAME))
    body = (ROOT / "examples/demo.jsonl").read_bytes()
    try:
        cloud.drop("demo", body)
        report = cloud.wait("demo")
        assert container.health == (0, "alive\n")
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0
    finally:
        worker.kill()
        worker.wait()
        sys.stdout.write(container.log.read_text(encoding="utf-8"))  # shown if it fails
    assert report["status"] == "completed"
    rows = cloud.rows("demo")
    assert [row["custom_id"] for row in rows] == [
        json.loads(line)["custom_id"] for line in body.splitlines()
    ]
    revision = Aws(ministack.client).run(find_weights(weights)).revision
    assert report["tidemill"]["model_revision"] == revision
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert report["tidemill"]["engine_version"] == project["version"]
    assert outside_volumes(image) == before
    assert not image.path(image.environment["NUMBA_CACHE_DIR"]).exists()  # nothing was compiled


def test_a_kernel_is_launched_without_a_compiler(image: Image, tmp_path: Path) -> None:
    """It needs only the image and a stub driver; nothing is written anywhere."""
    made = make_stub_library(tmp_path, BODY)
    before = outside_volumes(image)
    container = Container(image, {"LD_LIBRARY_PATH": str(made.parent)}, tmp_path / "log")
    code = Path(launched.__file__).read_text(encoding="utf-8")
    status, output = container.output(image.program("python"), "-c", code)
    assert status == 0, output
    assert "cuLaunchKernelEx" in output.split()
    assert outside_volumes(image) == before
    assert not image.path(image.environment["TRITON_CACHE_DIR"]).exists()  # nothing was compiled


def test_without_words_it_is_a_worker(image: Image, tmp_path: Path) -> None:
    """It reports the settings that it needs."""
    container = Container(image, {}, tmp_path / "log")
    assert container.start().wait(60) == 2
    assert "TIDEMILL_TABLE: Field required" in container.log.read_text(encoding="utf-8")


def test_with_the_word_of_sagemaker_it_is_a_server(image: Image, tmp_path: Path) -> None:
    """It listens on the image's port at every address, is healthy, and a signal ends it."""
    before = outside_volumes(image)
    port = free_port()
    container = Container(image, {"TIDEMILL_SERVER_PORT": str(port)}, tmp_path / "log")
    server = container.start("serve")
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            until_listening(container.log, server)
            assert client.get("/ping").status_code == 200
            body = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
            answer = client.post("/invocations", json=body).json()
            assert answer["choices"][0]["message"]["content"] == "Paris"
            assert container.health == (0, "alive\n")
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait()
        sys.stdout.write(container.log.read_text(encoding="utf-8"))  # shown if it fails
    assert "at http://0.0.0.0:" in container.log.read_text(encoding="utf-8")
    assert outside_volumes(image) == before


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def until_listening(log: Path, server: subprocess.Popen[bytes]) -> None:
    """Wait until a server says where it is."""
    while " at http://" not in log.read_text(encoding="utf-8"):
        assert server.poll() is None, "the server has ended"
        time.sleep(0.1)
