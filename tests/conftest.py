"""Shared fixtures, and the distribution of tests over processes."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Final

import pytest
from _pytest.logging import catching_logs
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from xdist.remote import Producer

from tests import warm_start
from tests.breadth import mark_breadth
from tests.byte_code import find_test_files, write_byte_code
from tests.emulators import NAMES, Emulator, running
from tests.folder_scope import close_unused
from tests.groups import GroupScheduling, place_of
from tests.process_state import ProcessState
from tests.shared_authorities import share_authorities
from tests.strict_store import StrictStore, strict_store
from tidemill import demo
from tidemill.engine.storage import disk_cache
from tidemill.engine.storage.disk_cache import CACHE_VARIABLE

# A busy machine must not fail a test.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "quick", settings.get_profile("patient"), max_examples=10, stateful_step_count=20
)
settings.register_profile(
    "full", settings.get_profile("patient"), max_examples=400, stateful_step_count=30
)
settings.load_profile("quick")

# Engines of tests run tiny models, several at once: extra threads would compete with each other.
os.environ |= {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
# Commands without `--model` run the small model: nothing is downloaded.
os.environ["TIDEMILL_DEMO_MODEL"] = str(demo.MODEL_PATH)
# Kernels are interpreted without a GPU; Triton reads this when it is first imported.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
# Engines that tests start as processes share a cache, new in each run: most use the demo model.
# In this process it is off, because a hit would hide what a test patches.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ[CACHE_VARIABLE] = tempfile.mkdtemp(prefix="tidemill-cache-")
    atexit.register(shutil.rmtree, os.environ[CACHE_VARIABLE], ignore_errors=True)
SHARED_CACHE = Path(os.environ[CACHE_VARIABLE])
_cache_folder = disk_cache.cache_folder
disk_cache.cache_folder = lambda: None if (folder := _cache_folder()) == SHARED_CACHE else folder

# Properties draw no constants of our sources, whose search takes seconds in each process.
if warm_start.COLD_VARIABLE not in os.environ:
    providers._get_local_constants = lambda: providers._local_constants

share_authorities()
warm_starts = warm_start.install()

_attach_handlers = catching_logs.__enter__
# Of the first handler of a pair, for the second.
_own_loggers: list[list[logging.Logger]] = []
# Shorter phases are not in the list of the slowest.
_SHOWN_SECONDS: Final = 0.005


def _attach_to_few(self: catching_logs[logging.Handler]) -> logging.Handler:
    """Attach pytest's handler of logs, but not to the loggers of torch, which have their own.

    There are about forty of them, and each phase of a test attaches a pair of handlers.
    """
    if self.level is not None:
        return _attach_handlers(self)
    if _own_loggers:
        own = _own_loggers.pop()
    else:
        own = [
            logger
            for name, logger in logging.root.manager.loggerDict.items()
            if isinstance(logger, logging.Logger)
            and not (logger.propagate or name.startswith(("torch", "strobelight", "c10d")))
        ]
        _own_loggers.append(own)
    self.attached_loggers = [logging.root, *own]
    for logger in self.attached_loggers:
        logger.addHandler(self.handler)
    return self.handler


if "attached_loggers" in getattr(catching_logs, "__slots__", ()):  # since pytest 9.1
    catching_logs.__enter__ = _attach_to_few  # type: ignore[assignment,method-assign]

# A shell's background job ignores Ctrl-C, and so would everything that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


# After pytest's own grouping, which would bring the tests of each emulator together.
@pytest.hookimpl(trylast=True)
def pytest_make_parametrize_id(val: object) -> str | None:
    """Name bytes by their length: gzip contains the time, and processes compare names."""
    return f"{len(val)} bytes" if isinstance(val, bytes) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude imported objects from garbage collection: they live to the end of the process.

    Searching its million objects takes half a second, a dozen times in each process.
    """
    gc.disable()
    try:
        result = yield
        assert "aws_cdk" not in sys.modules, "tests import it when they run: it starts a process"
        return result
    finally:
        gc.freeze()
        gc.enable()


# After pytest-randomly, which shuffles modules, and the tests within each.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Leave breadth to `make test-all`, and start the slowest groups first."""
    mark_breadth(items)
    yield
    items.sort(key=lambda item: place_of(item.nodeid))


def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Fork the processes of tests from a server, too, and compile the tests while it starts."""
    if warm_starts is not None:
        warm_starts.start_wanted(is_wanted=True)
    if not sys.dont_write_bytecode:
        write_byte_code(find_test_files(config.args), config)
    if warm_starts is not None:
        warm_starts.wait()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> GroupScheduling:
    """Distribute groups of tests instead of single tests: see tests/groups.py."""
    return GroupScheduling(config, log)


@pytest.hookimpl
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Report only the call of a test that passed, in a distributed run: one message of five.

    The other phases are reported if they last long enough for the list of the slowest.
    """
    if not hasattr(item.config, "workerinput"):
        return None
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    is_passed = all(report.passed for report in reports)
    for report in reports:
        if not is_passed or report.when == "call" or report.duration >= _SHOWN_SECONDS:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """End the values that the files of a folder share, after its last test."""
    if warm_starts is not None:
        warm_starts.start_wanted()
    close_unused(None if nextitem is None else nextitem.path)


@pytest.fixture(scope="module")
def proved() -> Iterator[None]:
    """Take models that a file loads as proved, as a second load does: for tests of something else.

    The comparison with transformers is most of a tiny model's load; tests/engine/model and
    `make test-all` make it.
    """
    if warm_start.COLD_VARIABLE in os.environ:
        yield
        return
    loadings = [
        import_module(f"tidemill.engine.model.{name}")
        for name in (
            *("loading", "encoders.loading", "encoders.two_towers_loading", "speech.loading"),
        )
    ]
    passed = import_module("tidemill.engine.model.native").ParityResult(
        holds=True, distance=0.0, num_layers=None
    )
    with pytest.MonkeyPatch.context() as patch:
        for loading in loadings:
            patch.setattr(loading, "run_once", lambda *_: passed)
        yield


@pytest.fixture(autouse=True)
def _unchanged_process() -> Iterator[None]:
    """Fail a test that changes the process: the next test would depend on it."""
    state = ProcessState()
    yield
    if changes := state.changes():
        pytest.fail("The test has changed the process: " + "; ".join(changes), pytrace=False)


@pytest.fixture(scope="session")
def start_emulator(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], Emulator]]:
    """Return a function that returns an emulator by name, started at the first use."""
    with ExitStack() as stack:

        @cache
        def start(name: str) -> Emulator:
            return stack.enter_context(running(name, tmp_path_factory.mktemp(name)))

        yield start


@pytest.fixture(scope="session")
def ministack(start_emulator: Callable[[str], Emulator]) -> Emulator:
    """MiniStack, for end-to-end tests: it sends events from the bucket to the queue."""
    return start_emulator("ministack")


@pytest.fixture(scope="session", params=NAMES)
def each_emulator(
    request: pytest.FixtureRequest, start_emulator: Callable[[str], Emulator]
) -> Emulator:
    """Each emulator in turn, for contracts with AWS."""
    return start_emulator(request.param)


@pytest.fixture(
    scope="session",
    params=[NAMES[0], *(pytest.param(name, marks=pytest.mark.long) for name in NAMES[1:])],
)
def emulator(request: pytest.FixtureRequest, start_emulator: Callable[[str], Emulator]) -> Emulator:
    """One emulator for logic above the adapters; `make test-all` runs it on each."""
    return start_emulator(request.param)


@pytest.fixture(scope="session")
def another_ministack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    """A second MiniStack, independent of the first."""
    with running("ministack", tmp_path_factory.mktemp("another-ministack")) as emulator:
        yield emulator


@pytest.fixture
def store(another_ministack: Emulator) -> Iterator[StrictStore]:
    """An S3-compatible store next to AWS, with a bucket."""
    with strict_store(another_ministack) as store:
        yield store
