"""What can go wrong: with one request, with one line of a file, or with the whole engine."""

from __future__ import annotations


class EngineError(Exception):
    """The engine cannot be built or cannot go on; the message is for the user.

    It stands here, not in `engine.errors`, for those who answer lines without loading a model.
    """

    code: str = "engine_error"


class ProtocolError(Exception):
    """Input that breaks the contract; `code` is what the row and the API show."""

    code: str = "protocol_error"


class RequestError(ProtocolError):
    """One request that gets an error row while the others go on.

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
    """The request names a model that is not served here."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"The model `{model}` does not exist.",
            param="model",
            code="model_not_found",
            status_code=404,
            type="not_found_error",
        )


class InternalError(RequestError):
    """A failure of ours inside one request; the others go on."""

    def __init__(self, message: str, *, code: str = "internal_error") -> None:
        super().__init__(message, code=code, status_code=500, type="server_error")


class LineError(ProtocolError):
    """A line of a file that is no request at all.

    `line` counts from 1 and includes blank lines; `code` is one of the batch error codes
    (`invalid_json_line`, `missing_required_parameter`, …); `custom_id` is None when it has none.
    """

    def __init__(
        self,
        message: str,
        *,
        line: int,
        code: str = "invalid_json_line",
        param: str | None = None,
        custom_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.line = line
        self.code = code
        self.param = param
        self.custom_id = custom_id
