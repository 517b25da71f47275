"""All routes of a server as one ASGI application."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from engine.contract import Online
from engine.protocol.errors import RequestError
from server import about, answers
from server.errors import fail, refuse, refuse_route
from server.front import Front
from server.gate import Gate
from server.means import Means
from server.metrics import Figures
from server.settings import ServerSettings


def make_means(engine: Online, names: tuple[str, ...], settings: ServerSettings) -> Means:
    """Return what the routes share."""
    gate = Gate(engine.info().max_num_seqs, settings.max_queued_requests)
    return Means(engine, names, settings, gate, Figures(engine, gate))


def make_app(means: Means, others: Sequence[BaseRoute] = ()) -> ASGIApp:
    """Return the application; `others` are routes beside those of every server."""
    routes = [*about.routes(means), *answers.routes(means), *others]
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
    return Front(app, means, paths)
