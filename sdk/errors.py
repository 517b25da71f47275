"""Errors of the Python API."""

from __future__ import annotations

import re
from typing import Any, Final, Self

from .public import public

_LINE: Final = re.compile(r"^(Line|Row) \d+: ")


@public
class TidemillError(Exception):
    """A run, a batch or an engine that cannot be, or cannot go on; the message says what to do."""


@public
class EngineDied(TidemillError):
    """The engine's process has ended; the message says how, with its last words.

    Its requests have no answer.
    """


@public
class RequestFailed(TidemillError):
    """A request that the engine refused or failed on, as an error of OpenAI's API."""

    def __init__(
        self, message: str, *, status_code: int, code: str | None, param: str | None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status_code = status_code
        self.code = code
        self.param = param

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Self:
        """Return the error of a row."""
        response = row.get("response")
        told: dict[str, Any] = row["error"] if response is None else response["body"]["error"]
        status = 400 if response is None else response["status_code"]
        code, param = told.get("code"), told.get("param")
        message = _LINE.sub("", told["message"])  # a request here is of no file
        return cls(message, status_code=status, code=code, param=param)
