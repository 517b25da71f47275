"""Routes that tell of the server: what it serves, how it is, what it does."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.protocol.errors import ModelNotFound
from engine.protocol.names import ANY_MODEL, own_names
from engine.protocol.validation import printable
from server.errors import as_json, stopping
from server.guide import NO_KEY, YOUR_KEY, page
from server.means import Means

OPEN_PATHS = frozenset({"/", "/health", "/ping"})
"""What is answered without a key: balancers and people who look for the way in have none."""


def routes(means: Means) -> list[Route]:
    """Return the routes that need no engine."""

    async def guide(request: Request) -> Response:
        # Whoever has no key is told of no model.
        has_keys = bool(means.settings.api_keys)
        name = "MODEL" if has_keys else own_names(means.names)[0]
        key = YOUR_KEY if has_keys else NO_KEY
        url = printable(str(request.base_url).rstrip("/"), 200)
        text = page(url, name, means.engine.info().endpoints, key)
        return Response(text, media_type="text/plain")

    async def models(_: Request) -> Response:
        own = own_names(means.names)
        return as_json(
            {
                "object": "list",
                "data": [_model(means, name) for name in _names(means)],
                "any_model": own[0] if ANY_MODEL in means.names else None,
            }
        )

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in _names(means):
            raise ModelNotFound(printable(name, 200), _names(means))
        return as_json(_model(means, name))

    async def health(_: Request) -> Response:
        if means.gate.is_closed:
            raise stopping(1)
        return as_json({"status": "ok"})

    async def version(_: Request) -> Response:
        return as_json({"version": means.engine.info().engine_version})

    async def metrics(_: Request) -> Response:
        return Response(means.figures.text(), media_type=CONTENT_TYPE_LATEST)

    return [
        Route("/", guide),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/health", health),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/version", version),
        Route("/metrics", metrics),
    ]


def _names(means: Means) -> tuple[str, ...]:
    return (*own_names(means.names), *means.engine.info().adapters)


def _model(means: Means, name: str) -> dict[str, object]:
    """Return OpenAI's object; the parent of an adapter is the model that it is of."""
    is_adapter = name in means.engine.info().adapters
    return {
        "id": name,
        "object": "model",
        "created": means.started,
        "owned_by": "tidemill",
        "root": own_names(means.names)[0],
        "parent": own_names(means.names)[0] if is_adapter else None,
    }
