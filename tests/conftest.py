"""Fixtures that several packages' tests share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.emulators import NAMES, Emulator, running

# A busy machine is no reason to fail.
settings.register_profile("tidemill", deadline=None)
settings.load_profile("tidemill")

# A shell's background job ignores Ctrl-C, and so would all that tests of it start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ministack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    """MiniStack, for tests of the whole: it sends events from the bucket to the queue."""
    with running("ministack", tmp_path_factory.mktemp("ministack")) as emulator:
        yield emulator


@pytest.fixture(scope="session", params=NAMES)
def emulator(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Emulator]:
    """Each emulator in turn, for contract tests."""
    name = request.param
    if name == "ministack":
        yield request.getfixturevalue("ministack")
        return
    with running(name, tmp_path_factory.mktemp(name)) as found:
        yield found
