"""A cloud that other people's clients talk to over HTTP: the API, a pump, and two workers."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import openai
import pytest

from localstack.cloud import Cloud as Processes
from localstack.resources import create_resources
from tests.emulators import Emulator, deployment_of
from tests.folder_scope import shared
from tests.handler.api.rig import serving
from tests.handler.api.server import listening
from tests.handler.intake.rig import Cloud
from tidemill import demo
from tidemill.batch.object_keys import DROP_TENANT
from tidemill.handler.aws.sync import Aws
from tidemill.handler.deployment import deployment as cached_deployment
from tidemill.handler.tenants.keys import KeyStore

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "tests/engine_process/scripted_engine.py"
# It answers every request, so that endpoints that our engine does not support can be tried.
SCRIPTED = "scripted"
QUICK = {
    "TIDEMILL_LEASE_SECONDS": "6",
    "TIDEMILL_FLUSH_SECONDS": "0.5",
    "TIDEMILL_WAIT_SECONDS": "1",
}


class Api(NamedTuple):
    """The address and key of a deployment."""

    url: str
    key: str


@pytest.fixture(scope="module")
def api(ministack: Emulator, tmp_path_factory: pytest.TempPathFactory) -> Api:
    """Return the API of a deployment that runs its batches, for all files here."""
    return shared(__file__, lambda: running_api(ministack, tmp_path_factory.mktemp("clients")))


@contextmanager
def running_api(ministack: Emulator, folder: Path) -> Iterator[Api]:
    """Run a deployment with its workers until the block is left."""
    resources = create_resources(
        ministack.endpoint_url, prefix="clients", models=[demo.NAME, SCRIPTED]
    )
    deployment = deployment_of(resources)
    environment = resources.environment | ministack.environment
    cloud = Cloud(ministack, Aws(ministack.client), deployment, environment)
    making = KeyStore(resources.table).create(
        tenant=DROP_TENANT, name="clients", now=int(time.time())
    )
    with Processes(resources, ministack.environment | QUICK, folder) as processes:
        processes.start_lambdas("--reaper-seconds", "5")
        processes.start_worker(name="demo")
        processes.start_worker(
            "--served-model-name",
            SCRIPTED,
            name="scripted",
            TIDEMILL_ENGINE_COMMAND=json.dumps([sys.executable, str(ENGINE)]),
        )
        with serving(cloud), listening() as url:
            cached_deployment()  # before a test, because it changes the process
            yield Api(f"{url}/v1", cloud.run(making))


@pytest.fixture
def client(api: Api) -> Iterator[openai.OpenAI]:
    """Return OpenAI's client, configured as in its documentation."""
    with openai.OpenAI(base_url=api.url, api_key=api.key) as client:
        yield client
