"""Errors of one request; other requests are not affected."""

from __future__ import annotations

from collections.abc import Sequence


class ProtocolError(Exception):
    """Input that violates the contract; `code` is in the row and in the API's response."""

    code: str = "protocol_error"


class RequestError(ProtocolError):
    """Error of one request, which gets an error row; other requests are not affected.

    `status_code` is the HTTP status of the row, `param` the body field at fault (dotted path).
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status_code: int = 400,
        type: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or "invalid_request"
        self.status_code = status_code
        self.type = type


class ModelNotFound(RequestError):
    """The request names a model that is not served."""

    def __init__(self, model: str, served_names: Sequence[str]) -> None:
        super().__init__(
            f"The model `{model}` does not exist. Served: {', '.join(served_names) or 'none'}.",
            param="model",
            code="model_not_found",
            status_code=404,
            type="not_found_error",
        )


class InternalError(RequestError):
    """Internal failure in one request; other requests are not affected."""

    def __init__(self, message: str, *, code: str = "internal_error") -> None:
        super().__init__(message, code=code, status_code=500, type="server_error")
