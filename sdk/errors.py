"""Errors of the Python API."""

from __future__ import annotations

import re
from typing import Any, Final, Self

from .public import public

_LINE: Final = re.compile(r"^(Line|Row) \d+: ")


@public
class TidemillError(Exception):
    """An invalid or failed run, batch or engine; the message contains the fix."""


@public
class EngineDied(TidemillError):
    """The engine's process has ended; the message contains the reason and the end of its stderr.

    Its pending requests have no answers.
    """


@public
class RequestFailed(TidemillError):
    """A request that the engine rejected or that failed, as an error of OpenAI's API."""

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
        error: dict[str, Any] = row["error"] if response is None else response["body"]["error"]
        status = 400 if response is None else response["status_code"]
        code, param = error.get("code"), error.get("param")
        message = _LINE.sub("", error["message"])  # the request does not come from a file
        return cls(message, status_code=status, code=code, param=param)
