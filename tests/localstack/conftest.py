"""A cloud as `tidemill local up` runs it, for the tests that only use one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from infra.config import DEFAULT_PATH
from localstack.local import LocalCloud, LocalOptions, running_cloud
from tests.folder_scope import shared
from tidemill.handler.fleet.stop import stop_workers

STOP_SECONDS = 60
IDLE_SECONDS = 900


# Deploying the stacks takes longer than most of what is tried on them. An idle cloud polls.
@pytest.fixture(scope="module")
def cloud() -> LocalCloud:
    """Return a cloud as `tidemill local up` runs it, for all files here."""
    # Starting a worker takes 15 CPU seconds, and on a busy machine it may wait for a minute.
    options = LocalOptions(
        config=DEFAULT_PATH, aliases=("gpt-4o-mini", "*"), idle_seconds=IDLE_SECONDS
    )
    return shared(__file__, lambda: running_cloud(options, lambda _: None))


@contextmanager
def replaced_workers(cloud: LocalCloud, *flags: str, **environment: str) -> Iterator[None]:
    """Let workers be others until the block is left, as after a deployment when all are idle."""

    def replace(*flags: str, **environment: str) -> None:
        cloud.release(*flags, **environment)
        for plan in cloud.aws.run(cloud.deployment.fleet_plans.read()).values():
            cloud.aws.run(stop_workers(cloud.deployment, plan))
        assert cloud.wait_until_idle(STOP_SECONDS)

    replace(*flags, **environment)
    try:
        yield
    finally:
        replace()
