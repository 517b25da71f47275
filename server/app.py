"""ASGI application: all routes of a server behind its middleware."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from tidemill.protocol.contract import Online
from tidemill.protocol.errors import RequestError

from . import (
    audio_routes,
    chat_batch_routes,
    inference_routes,
    info_routes,
    message_routes,
    sagemaker_routes,
)
from .admission import AdmissionControl
from .context import ServerContext
from .errors import handle_http_exception, handle_internal_error, handle_request_error
from .metrics import ServerMetrics
from .middleware import ServerMiddleware
from .request_bodies import BodyReader
from .settings import ServerSettings


def make_context(engine: Online, names: tuple[str, ...], settings: ServerSettings) -> ServerContext:
    """Return the context that the routes share."""
    admission = AdmissionControl(engine.info().max_num_seqs, settings.max_queued_requests)
    body_reader = BodyReader(settings.max_body_bytes, settings.body_seconds)
    return ServerContext(
        engine, names, settings, admission, ServerMetrics(engine, admission), body_reader
    )


def make_app(context: ServerContext, others: Sequence[BaseRoute] = ()) -> ASGIApp:
    """Return the application; `others` precede the routes of every server."""
    modules = (
        *(info_routes, inference_routes, chat_batch_routes),
        *(message_routes, audio_routes, sagemaker_routes),
    )
    # The first route of a path answers: the routes of stored responses replace the plain one.
    routes = [*others, *(route for module in modules for route in module.routes(context))]
    app = Starlette(
        routes=routes,
        exception_handlers={
            RequestError: handle_request_error,
            HTTPException: handle_http_exception,
            Exception: handle_internal_error,
        },
    )
    app.router.redirect_slashes = False
    paths = frozenset(route.path for route in routes if isinstance(route, Route))
    middleware = ServerMiddleware(app, context, paths)
    if not context.settings.allowed_origins:
        return middleware
    # Outside the middleware: a CORS preflight request has no key.
    return CORSMiddleware(
        middleware,
        allow_origins=context.settings.allowed_origins,
        allow_methods=["*"],
        allow_headers=["*"],
    )
