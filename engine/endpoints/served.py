"""The engine behind its endpoints: any url and body in, one reply out, whatever happens."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from engine.contract import EngineInfo, EngineStats, Reply
from engine.endpoints import Endpoint
from engine.errors import EngineError
from engine.protocol.bodies import error_body
from engine.protocol.errors import InternalError, RequestError
from engine.protocol.names import name_of_model, own_names
from engine.protocol.routes import UNKNOWN_URL, served_route
from engine.protocol.stream import STREAM_NOT_SUPPORTED, refuse_stream
from engine.protocol.validation import printable

_logger = logging.getLogger(__name__)

_MAX_NAME_CHARS = 200
# The failures that vLLM's dialect prints as a plain message.
_BARE_CODES = frozenset({UNKNOWN_URL, STREAM_NOT_SUPPORTED})


class StepLoop(Protocol):
    """What runs below the endpoints, as far as the owner of the engine has to do with it."""

    def stats(self) -> EngineStats:
        """Return a snapshot of the work; callable from any thread."""

    def close(self) -> None:
        """Stop after the step now running."""


class ServedEngine:
    """Answers requests through the endpoints of one model, which `engine` runs; a `Served`.

    `model_names` are the names that requests may ask for, `ANY_MODEL` among them for every name;
    the first that is a name stands in where none is given.
    """

    def __init__(
        self,
        endpoints: Iterable[Endpoint],
        engine: StepLoop,
        info: EngineInfo,
        *,
        model_names: Sequence[str],
    ) -> None:
        if not own_names(model_names):
            raise ValueError("an engine needs the name of its model")
        self._endpoints = {endpoint.route.name: endpoint for endpoint in endpoints}
        self._engine = engine
        self._info = info
        self._model_names = tuple(model_names)

    async def respond(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        """Answer one request; never raises for what the request holds.

        Raises `EngineError` only when the engine is gone and nothing can be answered any more.

        Looked at in this order: the url, `stream`, `model`, the rest of the body.
        """
        try:
            endpoint = self._endpoints[served_route(url, self._endpoints).name]
            refuse_stream(body)
            model = name_of_model(body, self._model_names)
            return await endpoint.reply_to(
                body, model=model, request_id=request_id, created=created
            )
        except RequestError as error:
            return _failed(error)
        except EngineError:
            raise  # the engine is gone: no row can tell of it
        except Exception as error:
            _logger.exception("the request %s failed", request_id)
            return _failed(InternalError(f"The engine failed: {type(error).__name__}."))

    def info(self) -> EngineInfo:
        """Return what runs here, and on what."""
        return self._info

    def stats(self) -> EngineStats:
        """Return a snapshot of the work; callable from any thread."""
        return self._engine.stats()

    def close(self) -> None:
        """Stop the engine after the step now running."""
        self._engine.close()


def _failed(error: RequestError) -> Reply:
    body = error_body(error)
    told = body["error"]
    told["message"] = printable(error.message)
    told["param"] = None if error.param is None else printable(error.param, _MAX_NAME_CHARS)
    return Reply(error.status_code, body, bare_message=error.code in _BARE_CODES)
