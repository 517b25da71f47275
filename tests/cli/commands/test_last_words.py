"""Tests of SageMaker's failure file, which a failed worker writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tidemill.cli.commands.worker import write_failure_file
from tidemill.handler.observability import logger
from tidemill.offline.console.errors import CliError, Refused


def command_that_logs(status: int, *words: str) -> Callable[[], int]:
    """Return a command that logs errors and ends with this status."""

    def command() -> int:
        for word in words:
            logger.error(word, reason="no device" if word == "engine died" else None)
        logger.warning("message left behind")
        return status

    return command


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (command_that_logs(1, "one", "engine died"), "engine died: no device"),
        (command_that_logs(1, "engine died", "other"), "other"),
        (command_that_logs(3), "ended with status 3"),
    ],
    ids=["with a reason", "the last", "without a word"],
)
def test_the_last_error_is_left(tmp_path: Path, command: Callable[[], int], words: str) -> None:
    """Only errors count, not warnings."""
    assert write_failure_file(command, tmp_path) == command()
    assert (tmp_path / "failure").read_text() == words


@pytest.mark.parametrize(
    ("failure", "words"),
    [(Refused("--queue is missing"), "--queue is missing"), (ValueError("x" * 9999), "ValueError")],
    ids=["a setting", "a fault of ours"],
)
def test_what_ends_a_command_is_left(tmp_path: Path, failure: Exception, words: str) -> None:
    """The exception is also raised; SageMaker shows the first thousand characters."""

    def command() -> int:
        raise failure

    with pytest.raises(type(failure)):
        write_failure_file(command, tmp_path)
    left = (tmp_path / "failure").read_text()
    assert words in left
    assert len(left) <= 1000


def test_a_good_end_leaves_nothing(tmp_path: Path) -> None:
    """Earlier log lines do not matter."""
    assert write_failure_file(command_that_logs(0, "engine died"), tmp_path) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    """The worker ends as it would have."""
    (tmp_path / "failure").mkdir()
    assert write_failure_file(command_that_logs(1, "one"), tmp_path) == 1


def test_without_sagemaker_s_folder_nothing_is_written(tmp_path: Path) -> None:
    """The folder is not created either."""
    folder = tmp_path / "output"
    assert write_failure_file(command_that_logs(1, "one"), folder) == 1
    with pytest.raises(CliError):
        write_failure_file(raising, folder)
    assert not folder.exists()


def raising() -> int:
    """Fail."""
    raise CliError("it fails")
