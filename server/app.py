"""All routes of a server as one ASGI application."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from engine.contract import Online
from engine.protocol.errors import RequestError
from server import about, answers, recordings, sagemaker
from server.bodies import Bodies
from server.errors import fail, refuse, refuse_route
from server.front import Front
from server.gate import Gate
from server.means import Means
from server.metrics import Figures
from server.settings import ServerSettings


def make_means(engine: Online, names: tuple[str, ...], settings: ServerSettings) -> Means:
    """Return what the routes share."""
    gate = Gate(engine.info().max_num_seqs, settings.max_queued_requests)
    bodies = Bodies(settings.max_body_bytes, settings.body_seconds)
    return Means(engine, names, settings, gate, Figures(engine, gate), bodies)


def make_app(means: Means, others: Sequence[BaseRoute] = ()) -> ASGIApp:
    """Return the application; `others` are routes beside those of every server."""
    rooms = (about, answers, recordings, sagemaker)
    routes = [*(route for room in rooms for route in room.routes(means)), *others]
    app = Starlette(
        routes=routes,
        exception_handlers={
            RequestError: refuse,
            HTTPException: refuse_route,
            Exception: fail,
        },
    )
    app.router.redirect_slashes = False
    paths = frozenset(route.path for route in routes if isinstance(route, Route))
    front = Front(app, means, paths)
    if not means.settings.allowed_origins:
        return front
    # Before the front: what a browser asks first has no key.
    return CORSMiddleware(
        front,
        allow_origins=means.settings.allowed_origins,
        allow_methods=["*"],
        allow_headers=["*"],
    )
