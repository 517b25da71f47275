"""Errors of batch values; each `code` is what the API, a Batch or a log line shows."""

from __future__ import annotations


class HandlerError(Exception):
    """Something that ends one operation; the message is for the user or the operator."""

    code: str = "handler_error"


class InvalidMove(HandlerError):
    """A status that cannot follow the one a batch has."""

    code = "invalid_move"


class InvalidOption(HandlerError):
    """A parameter of a batch that cannot be; `param` names it."""

    code = "invalid_option"

    def __init__(self, message: str, *, param: str | None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class KeyReused(InvalidOption):
    """An idempotency key that has made another batch than the one that is asked for."""

    code = "idempotency_key_reused"


class BadPart(HandlerError):
    """Bytes under `work/` that are no part of ours."""

    code = "bad_part"


def excerpt(value: object) -> str:
    """Return what a client sent as a message may show it: short, and always printable."""
    return ascii(value)[:80]
