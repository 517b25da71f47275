"""A deployment that the API of this process belongs to, and clients of it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from openai import OpenAI

from handler.keys import KeyStore
from tests.emulators import Emulator
from tests.handler.api.rig import URL, Gateway, serving
from tests.handler.intake.rig import Cloud


@pytest.fixture
def any_cloud(emulator: Emulator) -> Iterator[Cloud]:
    """Return such a deployment on each emulator in turn."""
    with serving(Cloud.on(emulator, "tidemill-demo")) as cloud:
        yield cloud


@pytest.fixture
def cloud(ministack: Emulator) -> Iterator[Cloud]:
    """Return a deployment of its own with two models, one of a name with a slash."""
    with serving(Cloud.on(ministack, "tidemill-demo", "lab/large", shard_lines="10")) as cloud:
        yield cloud


@pytest.fixture
def token(cloud: Cloud) -> str:
    """Return a key of the tenant `default`."""
    keys = KeyStore(cloud.deployment.table.name)
    return cloud.run(keys.create(tenant="default", name="test", now=1))


@pytest.fixture
def client(token: str) -> Iterator[OpenAI]:
    """Return OpenAI's client, which knows nothing of us, for that tenant."""
    with (
        httpx.Client(transport=Gateway()) as http,
        OpenAI(base_url=f"{URL}/v1", api_key=token, http_client=http, max_retries=0) as client,
    ):
        yield client
