"""Setup of the Files and Batches API: its routes and its batch runner."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from starlette.routing import Route

from tidemill.protocol.contract import Responder, Served
from tidemill.protocol.names import own_names

from ..context import ServerContext
from .batch_routes import BatchRoutes
from .dashboard_routes import DashboardRoutes
from .file_routes import MAX_FILE_BYTES, FileRoutes
from .message_batch_routes import MessageBatchRoutes
from .response_routes import ResponseRoutes
from .runner import Runner
from .store import Store
from .upload_routes import UploadRoutes


@dataclass(frozen=True, slots=True)
class LocalBatches:
    """The routes of files and batches; batches run while `running` is entered."""

    routes: Sequence[Route]
    running: Callable[[], AbstractAsyncContextManager[None]]


def make_local_batches(
    store: Store,
    engine: Served,
    names: Sequence[str],
    max_file_bytes: int | None = None,
    responder: Responder | None = None,
    *,
    context: ServerContext,
    has_keys: bool = False,
) -> LocalBatches:
    """Return the API and the dashboard of a store; `names` are the served model names.

    `max_file_bytes` bounds an uploaded file; a `responder` answers lines in place of the engine.
    With `has_keys`, the dashboard has a sign-in form. Responses are answered in a `context`.
    """
    model = own_names(names)[0]
    models = dict.fromkeys((*names, *engine.info().adapters), model)
    runner = Runner(store, engine, models, responder=responder)
    most = MAX_FILE_BYTES if max_file_bytes is None else max_file_bytes
    files, batches = FileRoutes(store, most), BatchRoutes(store, runner)
    dashboard = DashboardRoutes(store, batches, files, [*models], has_keys=has_keys)
    messages = MessageBatchRoutes(store, runner, batches, context)
    apis = (files, UploadRoutes(store, most), batches, messages, dashboard)
    routes = [route for api in apis for route in api.routes()]
    responses = ResponseRoutes(context, store.responses)

    @asynccontextmanager
    async def running() -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(runner.running())
            await stack.enter_async_context(responses.running())
            yield

    return LocalBatches([*responses.routes(), *routes], running)
