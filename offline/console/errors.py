"""Command-line exceptions, each with an exit status and a message for the user."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

TRACEBACK: Final = "TIDEMILL_TRACEBACK"
"""Environment variable: print the traceback of an unexpected exception before its message."""

ROWS_FAILED = 3
"""Exit status of a completed run or batch with error rows."""

OVER_LIMIT = 5
"""Exit status of a run that reached its limit of time or cost."""

STACKS = "Stacks of all threads, for a bug report:\n"
"""First line of details that contain thread stacks."""


class CliError(Exception):
    """The command cannot continue; the message contains the problem and the fix.

    `details` are printed after the message, for a bug report.
    """

    code: str = "failed"
    exit_status: int = 1

    def __init__(self, message: str, *, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class Refused(CliError):
    """The command is not valid as typed; nothing was read or written."""

    code = "refused"
    exit_status = 2


class BadInput(CliError):
    """The input, or the output to resume, is invalid."""

    code = "bad_input"


class InputChanged(BadInput):
    """The input changed while the command read it."""

    code = "input_changed"


class TransferFailed(CliError):
    """A download of the input or an upload of the output failed."""

    code = "transfer_failed"


class OutputLost(CliError):
    """The output can no longer be written: the disk is full, or its file or reader is gone."""

    code = "output_lost"


class EngineFailed(CliError):
    """The engine did not start, or has failed."""

    code = "engine_failed"


class EngineLost(EngineFailed):
    """The engine exited or hung during the run because of its device or machine, not a line."""

    code = "engine_lost"
    exit_status = 4


class RunIncomplete(CliError):
    """A run or a join ended early because of a bug, or a lack of memory or threads.

    Finished rows are in the output or its spool, for a resume; shards are unchanged.
    """

    code = "run_incomplete"
    exit_status = 6


class ServerRefused(CliError):
    """The API returned an error; `status` and `error_code` are from its response."""

    code = "server_refused"

    def __init__(self, message: str, *, status: int = 0, error_code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.error_code = error_code


class Unreachable(CliError):
    """The API or its storage did not answer within the retry time."""

    code = "unreachable"
    exit_status = 7


class KeyRefused(CliError):
    """The API rejected the key, or AWS rejected the credentials."""

    code = "key_refused"
    exit_status = 8


def failure_of(exc: BaseException) -> str:
    """Return an unexpected exception and its location as one line, for a message.

    If TIDEMILL_TRACEBACK is set, the traceback is printed first.
    """
    if os.environ.get(TRACEBACK):
        traceback.print_exception(exc)
    frames = traceback.extract_tb(exc.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(_PACKAGE)]
    words = f"{type(exc).__name__}: {exc}".removesuffix(": ").splitlines()[0]
    if not ours:
        return words
    return f"{words}, at {ours[-1].filename.removeprefix(_PACKAGE)}:{ours[-1].lineno}"


@contextmanager
def unexpected_in_words(words: str) -> Iterator[None]:
    """Raise RunIncomplete with this message for any unexpected exception, including SystemExit."""
    try:
        yield
    except (CliError, KeyboardInterrupt, OSError):
        raise
    except BaseException as exc:
        raise RunIncomplete(f"{words} ({failure_of(exc)})") from exc


_PACKAGE: Final = f"{Path(__file__).parents[2]}{os.sep}"


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM arrived. A KeyboardInterrupt, so that no library swallows it."""

    def __init__(self, signum: int, words: str = "nothing was written") -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}: {words}")
        self.signum = signum
        self.exit_status = 128 + signum
