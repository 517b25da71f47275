"""What ends a command early: each knows its exit status, and its message is for the user."""

from __future__ import annotations

import signal

ROWS_FAILED = 3
"""The exit status of what was done to its end, with rows that are errors."""


class CliError(Exception):
    """The command cannot go on; the message says what is wrong and what to do."""

    code: str = "failed"
    exit_status: int = 1


class Refused(CliError):
    """The command cannot work as typed; nothing was read or written."""

    code = "refused"
    exit_status = 2


class BadInput(CliError):
    """The input, or the output that is to be resumed, is not what it must be."""

    code = "bad_input"


class InputChanged(BadInput):
    """The input is not what it was when the command began to read it."""

    code = "input_changed"


class TransferFailed(CliError):
    """An http(s) server did not give the input or take the output."""

    code = "transfer_failed"


class OutputLost(CliError):
    """The output cannot be written any more: the disk is full, or the file or its reader went."""

    code = "output_lost"


class EngineFailed(CliError):
    """The engine did not start or cannot go on."""

    code = "engine_failed"


class EngineLost(EngineFailed):
    """The engine has ended amid the lines: its device or its machine failed, and no line did."""

    code = "engine_lost"
    exit_status = 4


class ServerRefused(CliError):
    """The API said no; `status` and `error_code` are its own."""

    code = "server_refused"

    def __init__(self, message: str, *, status: int = 0, error_code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.error_code = error_code


class Unreachable(CliError):
    """The API, or the storage behind it, did not answer for as long as it was asked."""

    code = "unreachable"
    exit_status = 7


class KeyRefused(CliError):
    """The API lets nobody in with this key."""

    code = "key_refused"
    exit_status = 8


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM came. A KeyboardInterrupt, so that no library swallows it."""

    def __init__(self, signum: int, words: str = "nothing was written") -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}: {words}")
        self.signum = signum
        self.exit_status = 128 + signum
