"""Deployment for tests and benchmarks: hand-made resources, local event source mappings.

Its processes can be killed and restarted one by one, which a deployment of the real stacks does not
allow; users run `localstack.local`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import boto3

from infra.ops.drops import Drops
from localstack.fleet import LocalFleet
from localstack.processes import Processes
from localstack.resources import Resources
from localstack.stacks import client_options
from tidemill.handler.aws.sync import Aws
from tidemill.handler.deployment import Deployment
from tidemill.handler.settings import read_settings


class Cloud(Processes, Drops):
    """The processes of one deployment and its bucket; a context manager that ends them all.

    `environment` is passed to every process, in addition to the names of the resources. Workers are
    started by hand, or by the `fleet`, which starts and stops them on demand.
    """

    def __init__(self, resources: Resources, environment: Mapping[str, str], folder: Path) -> None:
        self.resources = resources
        fleets = {"TIDEMILL_FLEETS": f"/{resources.table}/fleets"}
        variables = {**resources.environment, **fleets, **environment}
        Processes.__init__(self, variables, folder)
        clients = client_options(environment)
        self.aws = Aws(lambda service, **options: boto3.client(service, **clients, **options))
        self.deployment = Deployment(read_settings(variables))
        Drops.__init__(self, self.aws.clients["s3"], resources.bucket)

    def fleet(self, notify: Callable[[str], None]) -> LocalFleet:
        """Return a machine for workers, without any release yet."""
        return LocalFleet(self, self.aws, self.deployment, notify)

    def start_lambdas(self, *options: str, name: str = "lambdas") -> subprocess.Popen[bytes]:
        """Start the local event source mappings; see `localstack.event_source_mapping`."""
        dead_letters = ("--dead-letters", self.resources.dead_letters)
        return self.start(
            name, sys.executable, "-m", "localstack.event_source_mapping", *dead_letters, *options
        )

    def start_worker(
        self, *options: str, name: str = "worker", **environment: str
    ) -> subprocess.Popen[bytes]:
        """Start `tidemill worker` with these flags."""
        return self.start(name, sys.executable, "-m", "tidemill", "worker", *options, **environment)
