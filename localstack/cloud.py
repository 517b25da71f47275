"""A deployment for tests and benchmarks: resources made by hand, and a pump in place of Lambda.

Its processes can be killed and started again one by one, which no deployment of the real stacks
allows; what people run is `localstack.local`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import boto3

from infra.drops import Drops
from localstack.processes import Processes
from localstack.resources import Resources


class Cloud(Processes, Drops):
    """The processes of one deployment and its bucket; a context manager that ends them all.

    `environment` is what every process gets beside the names of the resources.
    """

    def __init__(self, resources: Resources, environment: Mapping[str, str], folder: Path) -> None:
        self.resources = resources
        Processes.__init__(self, {**resources.environment, **environment}, folder)
        s3 = boto3.client(
            "s3",
            endpoint_url=environment["AWS_ENDPOINT_URL"],
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )
        Drops.__init__(self, s3, resources.bucket)

    def start_pump(self, *options: str, name: str = "pump") -> subprocess.Popen[bytes]:
        """Start the stand-in for Lambda; see `localstack.pump`."""
        dead_letters = ("--dead-letters", self.resources.dead_letters)
        return self.start(name, sys.executable, "-m", "localstack.pump", *dead_letters, *options)

    def start_worker(
        self, *options: str, name: str = "worker", **environment: str
    ) -> subprocess.Popen[bytes]:
        """Start `tidemill worker` with these flags."""
        return self.start(name, sys.executable, "-m", "cli", "worker", *options, **environment)
