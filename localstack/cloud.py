"""A whole deployment on one machine: the Lambdas in a pump, workers as processes of their own.

    python -m localstack.cloud [flags of `tidemill worker`]

starts MiniStack (or takes the emulator that AWS_ENDPOINT_URL names), makes the resources, runs one
worker, says where to drop files, and ends everything on Ctrl-C.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import boto3
from botocore.exceptions import ClientError

from localstack.ministack import EmulatorMissing, environment_for, running_ministack
from localstack.resources import Resources, create_resources

ROOT = Path(__file__).parent.parent
_STOP_SECONDS = 70


class NotFinished(Exception):
    """A batch that has no report in time; the message says where it stands."""


class Cloud:
    """Processes of one deployment; a context manager that ends them all.

    `environment` holds what every process gets; each logs to `folder/<name>.log`.
    """

    def __init__(self, resources: Resources, environment: Mapping[str, str], folder: Path) -> None:
        self.resources = resources
        self.environment = {**resources.environment, **environment}
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        endpoint_url = environment["AWS_ENDPOINT_URL"]
        self.s3: Any = boto3.client(
            "s3",
            endpoint_url=endpoint_url,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self, name: str, *command: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start a process of this name, or start it again; its log goes on."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(  # noqa: S603 - our own command
                command,
                cwd=ROOT,
                env={**os.environ, **self.environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.processes[name] = process
        return process

    def start_pump(self, *options: str, name: str = "pump") -> subprocess.Popen[bytes]:
        """Start the stand-in for Lambda; see `localstack.pump`."""
        dead_letters = ("--dead-letters", self.resources.dead_letters)
        return self.start(name, sys.executable, "-m", "localstack.pump", *dead_letters, *options)

    def start_worker(
        self, *options: str, name: str = "worker", **environment: str
    ) -> subprocess.Popen[bytes]:
        """Start `tidemill worker` with these flags."""
        return self.start(name, sys.executable, "-m", "cli", "worker", *options, **environment)

    def log_of(self, name: str) -> str:
        """Return what a process has logged so far."""
        return (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def drop(self, name: str, body: bytes, **metadata: str) -> None:
        """Upload `input/<name>.jsonl` as a user does; `_` in an option's name stands for `-`."""
        self.s3.put_object(
            Bucket=self.resources.bucket,
            Key=f"input/{name}.jsonl",
            Body=body,
            Metadata={option.replace("_", "-"): value for option, value in metadata.items()},
        )

    def wait(self, name: str, seconds: float = 120) -> dict[str, Any]:
        """Return the report of a dropped file once it is there; raises NotFinished."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (report := self.read(f"output/{name}.batch.json")) is not None:
                found: dict[str, Any] = json.loads(report)
                return found
            time.sleep(0.1)
        raise NotFinished(f"{name}: no report after {seconds:g} s")

    def read(self, key: str) -> bytes | None:
        """Return an object of the bucket, or None."""
        try:
            body: bytes = self.s3.get_object(Bucket=self.resources.bucket, Key=key)["Body"].read()
        except ClientError as exc:
            if exc.response["Error"]["Code"] in {"NoSuchKey", "404"}:
                return None
            raise
        return body

    def rows(self, name: str, kind: str = "") -> list[dict[str, Any]]:
        """Return the rows of a dropped file's output, or with `.errors` of its errors."""
        body = self.read(f"output/{name}{kind}.jsonl") or b""
        return [json.loads(line) for line in body.splitlines()]

    def stop(self) -> None:
        """End every process: politely first."""
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + _STOP_SECONDS
        for process in self.processes.values():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def main(worker_options: Sequence[str] | None = None) -> int:
    """Run a cloud until it is interrupted or its worker ends."""
    import demo  # the model that answers unless another is named

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    options = list(sys.argv[1:] if worker_options is None else worker_options)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidemill-")))
        endpoint_url = os.environ.get("AWS_ENDPOINT_URL")
        try:
            endpoint_url = endpoint_url or stack.enter_context(running_ministack(folder))
        except EmulatorMissing as exc:
            sys.stderr.write(f"{exc}\n")
            return 2
        resources = create_resources(endpoint_url, prefix="tidemill", models=[demo.NAME])
        # A worker that looks at its queue for a second only is stopped as quickly.
        environment = environment_for(endpoint_url) | {"TIDEMILL_WAIT_SECONDS": "1"}
        cloud = stack.enter_context(Cloud(resources, environment, folder))
        cloud.start_pump()
        worker = cloud.start_worker(*options)
        where = f"s3://{resources.bucket}"
        sys.stdout.write(
            f"Drop a file:   aws --endpoint-url {endpoint_url} s3 cp FILE {where}/input/x.jsonl\n"
            f"Fetch results: aws --endpoint-url {endpoint_url} s3 sync {where}/output .\n"
            "Any credentials will do. Ctrl-C ends it.\n"
        )
        sys.stdout.flush()
        try:
            status = worker.wait()
        except KeyboardInterrupt:
            return 0
        sys.stderr.write(cloud.log_of("worker"))
        return status


if __name__ == "__main__":
    sys.exit(main())
