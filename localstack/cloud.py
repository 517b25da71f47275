"""A deployment for tests and benchmarks: resources made by hand, and a pump in place of Lambda.

Its processes can be killed and started again one by one, which no deployment of the real stacks
allows; what people run is `localstack.local`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import boto3

from handler.aws.sync import Aws
from handler.deployment import Deployment
from handler.settings import read_settings
from infra.drops import Drops
from localstack.fleet import LocalFleet
from localstack.processes import Processes
from localstack.resources import Resources
from localstack.stacks import client_options


class Cloud(Processes, Drops):
    """The processes of one deployment and its bucket; a context manager that ends them all.

    `environment` is what every process gets beside the names of the resources. Workers are those
    that are started by hand, or those of the `fleet`, which come and go by themselves.
    """

    def __init__(self, resources: Resources, environment: Mapping[str, str], folder: Path) -> None:
        self.resources = resources
        fleets = {"TIDEMILL_FLEETS": f"/{resources.table}/fleets"}
        told = {**resources.environment, **fleets, **environment}
        Processes.__init__(self, told, folder)
        clients = client_options(environment)
        self.aws = Aws(lambda service, **options: boto3.client(service, **clients, **options))
        self.deployment = Deployment(read_settings(told))
        Drops.__init__(self, self.aws.clients["s3"], resources.bucket)

    def fleet(self, say: Callable[[str], None]) -> LocalFleet:
        """Return a machine for workers, without any release yet."""
        return LocalFleet(self, self.aws, self.deployment, say)

    def start_pump(self, *options: str, name: str = "pump") -> subprocess.Popen[bytes]:
        """Start the stand-in for Lambda; see `localstack.pump`."""
        dead_letters = ("--dead-letters", self.resources.dead_letters)
        return self.start(name, sys.executable, "-m", "localstack.pump", *dead_letters, *options)

    def start_worker(
        self, *options: str, name: str = "worker", **environment: str
    ) -> subprocess.Popen[bytes]:
        """Start `tidemill worker` with these flags."""
        return self.start(name, sys.executable, "-m", "cli", "worker", *options, **environment)
