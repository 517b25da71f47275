"""Files and batches of one server, put together: its routes, and its work beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from starlette.routing import Route

from engine.contract import Online
from engine.protocol.names import own_names
from server.local.batch_routes import BatchRoutes
from server.local.file_routes import MAX_FILE_BYTES, FileRoutes
from server.local.runner import Runner
from server.local.store import Store
from server.local.upload_routes import UploadRoutes


@dataclass(frozen=True, slots=True)
class Local:
    """What a server answers beside single requests, and what is done while `at_work` is entered."""

    routes: Sequence[Route]
    at_work: Callable[[], AbstractAsyncContextManager[None]]


def make_local(
    store: Store, engine: Online, names: Sequence[str], max_file_bytes: int | None = None
) -> Local:
    """Return the files and batches of a store; `names` are those that the model is served under.

    A file may hold `max_file_bytes`.
    """
    model = own_names(names)[0]
    runner = Runner(store, engine, dict.fromkeys((*names, *engine.info().adapters), model))
    most = MAX_FILE_BYTES if max_file_bytes is None else max_file_bytes
    rooms = (FileRoutes(store, most), UploadRoutes(store, most), BatchRoutes(store, runner))
    return Local([route for room in rooms for route in room.routes()], runner.at_work)
