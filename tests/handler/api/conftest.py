"""A deployment that the API of this process belongs to, and clients of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest
from openai import OpenAI

from tests.emulators import Emulator
from tests.handler.api.rig import URL, Gateway, serving
from tests.handler.intake.rig import Cloud
from tidemill.handler.tenants.keys import KeyStore


@pytest.fixture
def any_cloud(emulator: Emulator) -> Iterator[Cloud]:
    """Return such a deployment on each emulator in turn."""
    with serving(Cloud.on(emulator, "tidemill-demo")) as cloud:
        yield cloud


@pytest.fixture
def cloud(ministack: Emulator) -> Iterator[Cloud]:
    """Return a separate deployment with two models, one of which has a slash in its name."""
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


@pytest.fixture
def client_of(any_cloud: Cloud) -> Iterator[Callable[[str], OpenAI]]:
    """Return what makes OpenAI's client for a tenant."""
    keys = KeyStore(any_cloud.deployment.table.name)
    with httpx.Client(transport=Gateway(), follow_redirects=True) as http:

        def make(tenant: str) -> OpenAI:
            token = any_cloud.run(keys.create(tenant=tenant, name="test", now=1))
            return OpenAI(base_url=f"{URL}/v1", api_key=token, http_client=http, max_retries=0)

        yield make


@pytest.fixture
def lab(client_of: Callable[[str], OpenAI]) -> OpenAI:
    """Return the client of a tenant."""
    return client_of("lab")
