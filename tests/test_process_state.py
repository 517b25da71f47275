"""Process changes that a test would leave to the next one are detected."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from tests import conftest, process_state
from tests.process_state import ProcessState
from tidemill.engine.kernels.backends import reference_kernels
from tidemill.handler.observability import logger


def test_an_unchanged_process_has_no_changes() -> None:
    """An event loop, ended threads and an idle pool do not count."""
    state = ProcessState()
    asyncio.run(asyncio.sleep(0))
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        assert state.changes() == []


def test_environment_folder_and_signals_are_restored(tmp_path: Path) -> None:
    """Each change is listed; then the next test starts from the same state."""
    state, folder = ProcessState(), Path.cwd()
    path = os.environ.pop("PATH")
    os.environ["TIDEMILL_OTHER"] = "x"
    os.chdir(tmp_path)
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    found = " ".join(state.changes())
    for name in ("variable PATH", "variable TIDEMILL_OTHER", "the working folder", "SIGUSR1"):
        assert name in found
    assert (os.environ["PATH"], Path.cwd(), signal.getsignal(signal.SIGUSR1)) == (
        path,
        folder,
        before,
    )
    assert "TIDEMILL_OTHER" not in os.environ
    assert state.changes() == []


def set_log_level() -> Iterator[None]:
    """Set the level of a logger."""
    root = logging.getLogger()
    before = root.level
    root.setLevel(7)
    yield
    root.setLevel(before)


def set_context_variable() -> Iterator[None]:
    """Set a context variable."""
    with reference_kernels():
        yield


def set_dtype() -> Iterator[None]:
    """Set torch's default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def start_thread() -> Iterator[None]:
    """Start a thread that does not end by itself."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="endless")
    thread.start()
    yield
    end.set()
    thread.join()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (set_log_level, "the logger root"),
        (set_context_variable, "_IS_REFERENCE"),
        (set_dtype, "torch.get_default_dtype()"),
        (start_thread, "endless"),
    ],
)
def test_other_changes_are_listed(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[], Iterator[None]], name: str
) -> None:
    """They stay, because only the code that made a change knows how to undo it."""
    monkeypatch.setattr(process_state, "_ENDING_SECONDS", 0.0)
    state = ProcessState()
    changing = change()
    next(changing)
    found = state.changes()
    next(changing, None)
    assert [name in each for each in found] == [True]
    assert state.changes() == []


def test_the_state_of_a_lambda_invocation_is_forgotten() -> None:
    """Powertools' logger retains them until the next invocation, which may be another test's."""
    state = ProcessState()
    logger.append_keys(correlation_id="x", function_name="api")
    assert state.changes() == []
    assert not {"correlation_id", "function_name"} & logger.registered_formatter.log_format.keys()


OWN_LOGGER = logging.getLogger("tests.own")


@pytest.fixture
def own_logger() -> Iterator[logging.Logger]:
    """A logger that no longer propagates."""
    OWN_LOGGER.propagate = False
    yield OWN_LOGGER
    OWN_LOGGER.propagate = True


def test_records_of_a_logger_that_does_not_propagate_are_captured(
    own_logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    """The quick attachment of pytest's handlers finds those that do not when a phase starts."""
    own_logger.warning("seen")
    assert caplog.messages == ["seen"]


@pytest.mark.parametrize(
    ("outcomes", "reported"),
    [
        ("passed passed passed", "call"),
        ("passed passed failed", "setup call teardown"),
        ("passed failed passed", "setup call teardown"),
        ("passed skipped passed", "setup call teardown"),
        ("failed passed", "setup teardown"),
    ],
)
def test_a_process_reports_all_phases_unless_they_pass(
    outcomes: str, reported: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test that passes is one report; any other has those that pytest itself would make."""
    words = outcomes.split()
    phases = ["setup", "call", "teardown"] if len(words) == 3 else ["setup", "teardown"]
    reports = [
        SimpleNamespace(when=phase, outcome=word, passed=word == "passed", duration=0.0)
        for phase, word in zip(phases, words, strict=True)
    ]
    sent: list[str] = []
    hooks = SimpleNamespace(pytest_runtest_logreport=lambda report: sent.append(report.when))
    config = SimpleNamespace(workerinput={})
    monkeypatch.setattr(conftest, "runtestprotocol", lambda _, **__: reports)
    item = cast("pytest.Item", SimpleNamespace(config=config, ihook=hooks))
    assert conftest.pytest_runtest_protocol(item, None)
    assert sent == reported.split()
