"""Errors of batch values; the API, a Batch or a log line shows each `code`."""

from __future__ import annotations


class HandlerError(Exception):
    """An error that ends one operation; the message is for the user or the operator."""

    code: str = "handler_error"


class InvalidMove(HandlerError):
    """A status that cannot follow the batch's current one."""

    code = "invalid_move"


class InvalidOption(HandlerError):
    """An invalid parameter of a batch; `param` is its name."""

    code = "invalid_option"

    def __init__(self, message: str, *, param: str | None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class KeyReused(InvalidOption):
    """An idempotency key that already belongs to another batch."""

    code = "idempotency_key_reused"


class BadPart(HandlerError):
    """Bytes under `work/` that are not a valid part."""

    code = "bad_part"


def excerpt(value: object) -> str:
    """Return a client's value for an error message: short and always printable."""
    return ascii(value)[:80]
