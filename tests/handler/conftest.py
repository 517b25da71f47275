"""Deployments on emulators."""

from __future__ import annotations

import os
from functools import cache

import pytest
from aiobotocore.session import AioSession

from tests.emulators import Emulator
from tests.handler.finalize.rig import Cloud
from tests.handler.intake.rig import Cloud as FileCloud
from tidemill.handler.aws import aio


@pytest.fixture(autouse=True, scope="session")
def _one_session_of_botocore() -> None:
    """Let workers in this process read the services' descriptions once: each took 0.2 s of CPU."""

    @cache
    def session_of(profile: str | None, _environment: frozenset[tuple[str, str]]) -> AioSession:
        return AioSession(profile=profile)

    def shared(profile: str | None = None) -> AioSession:
        aws = ((name, value) for name, value in os.environ.items() if name.startswith("AWS_"))
        return session_of(profile, frozenset(aws))

    assert aio.AioSession is AioSession, "it is replaced already, or has another name"
    aio.AioSession = shared


@pytest.fixture
def cloud(emulator: Emulator) -> Cloud:
    """Return a deployment with batches, on each emulator in turn."""
    return Cloud.on(emulator)


@pytest.fixture
def mini(ministack: Emulator) -> Cloud:
    """Return a deployment on the emulator that enforces most, for what is not about AWS."""
    return Cloud.on(ministack)


@pytest.fixture
def files(emulator: Emulator) -> FileCloud:
    """Return a deployment into which files are put, on each emulator in turn."""
    return FileCloud.on(emulator, shard_lines="10")
