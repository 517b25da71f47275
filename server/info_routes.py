"""Info routes: guide, models, tokenizer, health, load, version and Prometheus metrics."""

from __future__ import annotations

import re
import time

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidemill.protocol.contract import Reply
from tidemill.protocol.errors import ModelNotFound
from tidemill.protocol.names import ANY_MODEL, own_names
from tidemill.protocol.routes import TOKENIZER_INFO
from tidemill.protocol.validation import printable

from .context import ServerContext
from .errors import json_response, reply_response, stopping
from .guide import NO_KEY, YOUR_KEY, guide_text
from .request_bodies import new_request_id

OPEN_PATHS = frozenset({"/", "/health", "/ping"})
"""Paths without checks: load balancers and first-time visitors have no key."""

ASSETS = "/dashboard/assets/"
"""Beginning of further paths without checks: browsers send an origin with requests for scripts."""

KEYLESS = re.compile(r"/dashboard(/files/[^/]*)?")
"""Paths that need no key: the dashboard's page, which has no data, and links with a token."""


def routes(context: ServerContext) -> list[Route]:
    """Return the routes that run nothing on the engine."""

    async def guide(request: Request) -> Response:
        # No model name for clients without a key.
        has_keys = bool(context.settings.api_keys)
        name = "MODEL" if has_keys else own_names(context.names)[0]
        key = YOUR_KEY if has_keys else NO_KEY
        url = printable(str(request.base_url).rstrip("/"), 200)
        text = guide_text(url, name, context.engine.info().endpoints, key)
        return Response(text, media_type="text/plain")

    async def models(_: Request) -> Response:
        own = own_names(context.names)
        return json_response(
            {
                "object": "list",
                "data": [_model(context, name) for name in _names(context)],
                "any_model": own[0] if ANY_MODEL in context.names else None,
            }
        )

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in _names(context):
            raise ModelNotFound(printable(name, 200), _names(context))
        return json_response(_model(context, name))

    async def health(_: Request) -> Response:
        if context.admission.is_closed:
            raise stopping(1)
        return json_response({"status": "ok"})

    async def version(_: Request) -> Response:
        return json_response({"version": context.engine.info().engine_version})

    async def tokenizer_info(_: Request) -> Response:
        created = int(time.time())
        reply = await context.engine.answer(TOKENIZER_INFO.name, {}, new_request_id(), created)
        assert isinstance(reply, Reply)
        return await reply_response(reply)

    async def metrics(_: Request) -> Response:
        return Response(context.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return [
        Route("/", guide),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/health", health),
        Route("/ping", health, methods=["GET", "POST"]),
        _load_route(context),
        Route("/version", version),
        Route(TOKENIZER_INFO.name, tokenizer_info),
        Route("/metrics", metrics),
    ]


def _load_route(context: ServerContext) -> Route:
    """Return vLLM's route of the number of requests in flight."""

    async def load(_: Request) -> Response:
        return json_response({"server_load": context.admission.num_in_flight})

    return Route("/load", load)


def _names(context: ServerContext) -> tuple[str, ...]:
    return (*own_names(context.names), *context.engine.info().adapters)


def _model(context: ServerContext, name: str) -> dict[str, object]:
    """Return OpenAI's model object; the parent of an adapter is its base model."""
    is_adapter = name in context.engine.info().adapters
    return {
        "id": name,
        "object": "model",
        "created": context.started,
        "owned_by": "tidemill",
        "root": own_names(context.names)[0],
        "parent": own_names(context.names)[0] if is_adapter else None,
    }
