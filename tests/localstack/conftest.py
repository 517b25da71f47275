"""A cloud as `tidemill local up` runs it, for the tests that only use one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from infra.config import DEFAULT_PATH
from localstack.local import LocalCloud, LocalOptions, running_cloud


# Deploying the stacks takes longer than most of what is tried on them.
@pytest.fixture(scope="session")
def cloud() -> Iterator[LocalCloud]:
    """Return a cloud as `tidemill local up` runs it."""
    options = LocalOptions(config=DEFAULT_PATH, aliases=("gpt-4o-mini", "*"))
    with running_cloud(options, lambda _: None) as found:
        yield found


@contextmanager
def replaced_workers(cloud: LocalCloud, *flags: str, **environment: str) -> Iterator[None]:
    """Let others stand in the workers' places until the block is left, each stopped as by ECS."""
    started = {name: process.args for name, process in cloud.processes.processes.items()}

    def replace(*flags: str, **environment: str) -> None:
        for name, command in started.items():
            process = cloud.processes.processes[name]
            process.terminate()
            process.wait(60)
            cloud.processes.start(name, *command, *flags, **environment)

    replace(*flags, **environment)
    try:
        yield
    finally:
        replace()
