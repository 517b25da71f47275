"""`tidemill serve`: an HTTP server with the OpenAI API."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from tidemill.offline.arguments.argument_types import (
    S3Folder,
    port_number,
    positive_int,
    size_in_bytes,
)
from tidemill.offline.console.errors import EngineFailed, Refused
from tidemill.offline.console.signals import StopSignals
from tidemill.offline.console.terminal import log
from tidemill.offline.engine.data_parallel import (
    DataParallelSize,
    add_data_parallel_flag,
    load_replicas,
    num_replicas,
)
from tidemill.offline.engine.engine import (
    Load,
    chat_template,
    engine_config,
    held_weights,
    load_engine,
    loaded_engine,
    require_engine,
    results_digests,
    served_names,
)
from tidemill.offline.engine.options import (
    EngineOptions,
    add_engine_flags,
    engine_fields,
    stall_limit,
)
from tidemill.offline.extras import not_installed
from tidemill.offline.run.reuse_flags import (
    add_reuse_flags,
    add_reuse_size_flag,
    check_reuse,
)

if TYPE_CHECKING:
    from tidemill.engine.config import EngineConfig
    from tidemill.offline.engine.watched_engine import Watch
    from tidemill.protocol.contract import Online, Responder
    from tidemill.server.context import ServerContext
    from tidemill.server.local.setup import LocalBatches
    from tidemill.server.local.store import Store
    from tidemill.server.settings import ServerSettings

_EPILOG = """\
examples:
  tidemill serve                                       (the demo model, on port 8000)
  tidemill serve --model path/or/hub-id --port 8080
  curl localhost:8000/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Hello"}], "stream": true}'

TIDEMILL_SERVER_HOST and TIDEMILL_SERVER_PORT set the defaults of --host and --port. The flags in
TIDEMILL_SERVER_FLAGS are inserted before the given ones, for containers started without any.
On SIGTERM or Ctrl-C, requests in flight may finish, then the server exits with 0.
"""
_KEYS = "TIDEMILL_SERVER_API_KEYS"
_START_AGAIN = "Restart the server"
_FLAGS = "TIDEMILL_SERVER_FLAGS"
_SAGEMAKER_MODEL = Path("/opt/ml/model")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(EngineOptions):
    """Options of a server; None means the server's default."""

    host: str
    port: int
    uds: str | None
    ssl_keyfile: Path | None
    ssl_certfile: Path | None
    api_keys: tuple[str, ...]
    allowed_origins: tuple[str, ...]
    allowed_hosts: tuple[str, ...]
    max_queued_requests: int | None
    max_body_bytes: int | None
    drain_timeout: int | None
    data_dir: Path | None
    max_file_bytes: int | None
    data_parallel_size: DataParallelSize = None
    reuse: Path | S3Folder | None = None
    reuse_sampled: bool = False
    reuse_max_size: int | None = None

    def __post_init__(self) -> None:
        """Raise Refused for flags that require `--reuse` without it."""
        check_reuse(self.reuse, self.reuse_max_size, sampled=self.reuse_sampled)


def add_environment_flags(typed: Sequence[str]) -> list[str]:
    """Insert the flags of `TIDEMILL_SERVER_FLAGS` into a `serve` command line.

    SageMaker starts a container with `serve` and no flags. Raises Refused.
    """
    name, *rest = typed or [""]
    if name != "serve":
        return [*typed]
    try:
        return [name, *shlex.split(os.environ.get(_FLAGS, "")), *rest]
    except ValueError as exc:
        raise Refused(f"{_FLAGS} cannot be parsed: {str(exc).lower()}") from exc


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `serve` to the command line."""
    parser = commands.add_parser(
        "serve",
        help="answer requests over HTTP",
        description="Serve a model over HTTP with OpenAI's API.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_server_flags(parser.add_argument_group("server"))
    add_engine_flags(parser)
    parser.set_defaults(command=command)


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    host = os.environ.get("TIDEMILL_SERVER_HOST", "127.0.0.1")
    port = os.environ.get("TIDEMILL_SERVER_PORT", "8000")
    add(
        "--host",
        default=host,
        help="listen on this address; 0.0.0.0 is every address (default: 127.0.0.1)",
    )
    add(
        "--port",
        type=port_number,
        default=port,
        help="listen on this port; 0 picks a free one (default: 8000)",
    )
    add("--uds", metavar="PATH", help="listen on a Unix socket instead of a port")
    add("--ssl-keyfile", type=Path, metavar="FILE", help="serve HTTPS with this key")
    add("--ssl-certfile", type=Path, metavar="FILE", help="serve HTTPS with this certificate")
    add(
        "--api-key",
        nargs="+",
        dest="api_keys",
        metavar="KEY",
        help=f"require one of these keys (default: the space-separated keys in {_KEYS})",
    )
    add(
        "--allowed-origins",
        nargs="+",
        default=(),
        metavar="ORIGIN",
        help="accept requests from web pages of these origins; * is any (default: none)",
    )
    add(
        "--allowed-hosts",
        nargs="+",
        default=(),
        metavar="NAME",
        help="accept these host names on a server without keys; * is any (default: those of "
        "this machine on a loopback address, otherwise any)",
    )
    add(
        "--max-queued-requests",
        type=positive_int,
        metavar="N",
        help="queue up to N requests; further ones get a 429 (default: 1024)",
    )
    add(
        "--max-body-bytes",
        type=size_in_bytes,
        metavar="SIZE",
        help="limit the size of a request (default: 36M)",
    )
    add(
        "--drain-timeout",
        type=positive_int,
        metavar="S",
        help="on SIGTERM, wait up to S seconds for requests in flight (default: 30)",
    )
    add(
        "--data-dir",
        "--files-dir",
        type=Path,
        metavar="FOLDER",
        help="store files and batches here (default: ~/.cache/tidemill/serve/PORT)",
    )
    add(
        "--max-file-bytes",
        type=size_in_bytes,
        metavar="SIZE",
        help="limit the size of an upload (default: 16G)",
    )
    add_data_parallel_flag(group)
    add_reuse_flags(group)
    add_reuse_size_flag(group)


def options_from(arguments: argparse.Namespace) -> ServeOptions:
    """Return the options of the parsed arguments."""
    keys = arguments.api_keys or os.environ.get(_KEYS, "").split()
    # An empty key, as from an unset variable, would leave the server open.
    if any(not re.fullmatch(r"[!-~]+", key) for key in keys):
        raise Refused(
            "--api-key: a key must be one or more printable ASCII characters without spaces"
        )
    return ServeOptions(
        host=arguments.host,
        port=arguments.port,
        uds=arguments.uds,
        ssl_keyfile=arguments.ssl_keyfile,
        ssl_certfile=arguments.ssl_certfile,
        api_keys=tuple(keys),
        allowed_origins=tuple(arguments.allowed_origins),
        allowed_hosts=tuple(arguments.allowed_hosts),
        max_queued_requests=arguments.max_queued_requests,
        max_body_bytes=arguments.max_body_bytes,
        drain_timeout=arguments.drain_timeout,
        data_dir=arguments.data_dir,
        max_file_bytes=arguments.max_file_bytes,
        data_parallel_size=arguments.data_parallel_size,
        reuse=arguments.reuse,
        reuse_sampled=arguments.reuse_sampled,
        reuse_max_size=arguments.reuse_max_size,
        **engine_fields(arguments),
    )


def command(arguments: argparse.Namespace) -> int:
    """Serve until a signal and return the exit status."""
    options = options_from(arguments)
    if options.model is None and (_SAGEMAKER_MODEL / "config.json").exists():
        options = replace(options, model=str(_SAGEMAKER_MODEL))
    if (options.ssl_certfile is None) != (options.ssl_keyfile is None):
        raise Refused("HTTPS requires both --ssl-certfile and --ssl-keyfile")
    require_engine("a server", options.model, "serve")
    count = num_replicas(options, options.data_parallel_size)
    if count > 1:
        return run_server(options, load=partial(load_replicas, options=options, count=count))
    from tidemill.offline.engine.watched_engine import Watch

    load = partial(load_engine, weights_cache=options.weights_cache)
    watch = Watch(stall_seconds=stall_limit(options), advice=_START_AGAIN, has_guard=True)
    return run_server(options, load=load, watch=watch)


def run_server(options: ServeOptions, *, load: Load[Online], watch: Watch | None = None) -> int:
    """Load the engine and serve it until a signal; raises CliError.

    `watch` is given for an engine in this process.
    """
    try:
        from tidemill.server.app import make_app, make_context
        from tidemill.server.local.setup import make_local_batches
        from tidemill.server.uvicorn_server import (
            CertificateRefused,
            check_address,
            make_server,
            raise_file_limit,
        )
    except ModuleNotFoundError as exc:
        raise not_installed("a server", [str(exc.name)], "engine", "serve") from exc
    names, settings = served_names(options), _settings(options)
    config, template = engine_config(options), chat_template(options)
    where = options.uds or f"{options.host}:{options.port}"
    try:
        check_address(settings)
    except CertificateRefused as exc:
        raise Refused(f"{exc} (--ssl-certfile, --ssl-keyfile)") from exc
    except OSError as exc:
        raise Refused(f"cannot listen on {where}: {exc.strerror or exc}") from exc
    with (
        StopSignals("nothing was served") as signals,
        _store(options) as store,
        _weights(options, config) as here,
        loaded_engine(load, here, names, template, watch) as engine,
        _responder(options, here, names, template, engine) as responder,
    ):
        context = make_context(engine, names, settings)
        local = make_local_batches(
            store,
            engine,
            names,
            options.max_file_bytes,
            responder,
            has_keys=bool(options.api_keys),
            context=context,
        )
        raise_file_limit()
        make_server(
            make_app(context, local.routes),
            context.admission,
            settings,
            on_signal=signals.on_signal,
            on_listening=partial(
                _log_address, names, engine.info().endpoints, has_keys=bool(options.api_keys)
            ),
            lifespan=partial(_lifespan, local, context),
        ).run()
    if context.admission.is_engine_lost:
        raise _lost(engine)
    log("stopped")
    return 0


def _lost(engine: Online) -> EngineFailed:
    """Return the error for an engine that has stopped, with the stacks of one that hangs."""
    from tidemill.protocol.contract import EngineError

    try:
        engine.stats()
    except EngineError as exc:
        words = f"the engine has stopped: {exc}. {_START_AGAIN}"
        return EngineFailed(words, details=getattr(exc, "stacks", ""))
    return EngineFailed(f"the engine has stopped. {_START_AGAIN}")


def _weights(options: ServeOptions, config: EngineConfig) -> AbstractContextManager[EngineConfig]:
    """Hold the weights before loading if results depend on them, or several engines load them.

    Otherwise, loading fetches them.
    """
    if options.reuse is None and options.data_parallel_size in {None, 1}:
        return nullcontext(config)
    return held_weights(config, options.weights_cache)


@contextmanager
def _responder(
    options: ServeOptions,
    config: EngineConfig,
    names: Sequence[str],
    template: str | None,
    engine: Online,
) -> Iterator[Responder | None]:
    """Yield a responder that reuses stored results; None without `--reuse`."""
    if options.reuse is None:
        yield None
        return
    from tidemill.batch.result_key import ResultKeys
    from tidemill.offline.run.reuse import ReusingResponder, all_names, daily_results

    name = options.model or config.model
    keys = ResultKeys(all_names(config, names), options.reuse_sampled)
    digest_at = results_digests(config, template)
    with daily_results(options, name, digest_at) as open_at:
        yield ReusingResponder(engine, open_at, keys)


def _log_address(
    names: Sequence[str], endpoints: Sequence[str], address: str, *, has_keys: bool
) -> None:
    """Log the server's address and an example client."""
    log(f"serving {', '.join(names)} at {address}")
    if "://" not in address:
        return
    from tidemill.server.guide import NO_KEY, YOUR_KEY, sdk_example

    # Clients cannot connect to the wildcard address.
    url = address.replace("://0.0.0.0", "://127.0.0.1").replace("://[::]", "://[::1]")
    key = YOUR_KEY if has_keys else NO_KEY
    lines = "\n".join(f"  {line}" for line in sdk_example(url, names[0], endpoints, key))
    log(f"base URL for OpenAI clients: {url}/v1\n{lines}")
    log(f"dashboard: {url}/dashboard")


@asynccontextmanager
async def _lifespan(local: LocalBatches, context: ServerContext) -> AsyncIterator[None]:
    """Run batches, watch the engine and the loop lag, and beat the heartbeat."""
    from tidemill.server.admission import watch_engine

    from ..health import VARIABLE, Heartbeat

    file = os.environ.get(VARIABLE)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(Heartbeat(Path(file) if file else None).beating())
        await stack.enter_async_context(context.metrics.loop_lag.measured())
        await stack.enter_async_context(watch_engine(context.engine, context.admission))
        await stack.enter_async_context(local.running())
        yield


@contextmanager
def _store(options: ServeOptions) -> Iterator[Store]:
    """Open the store of files and batches, before a model is loaded; raises Refused.

    The store is in a temporary folder if the port is random, or the default folder is not
    writable, as in some containers.
    """
    from tidemill.server.local.folder import FolderLocked, FolderRefused
    from tidemill.server.local.store import open_store

    with ExitStack() as stack:
        folder = options.data_dir or _default_folder(options)
        try:
            store = None if folder is None else stack.enter_context(open_store(folder))
        except FolderRefused as exc:
            if options.data_dir is not None or isinstance(exc, FolderLocked):
                raise Refused(f"{exc} (--data-dir)") from exc
            log(f"note: {exc}")
            store = None
        if store is None:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="tidemill-serve-")))
            log(
                f"files and batches are stored in {folder} until the server stops: pass --data-dir "
                "to keep them"
            )
            store = stack.enter_context(open_store(folder))
        yield store


def _default_folder(options: ServeOptions) -> Path | None:
    from tidemill.engine.storage.disk_cache import cache_folder

    name = quote(options.uds, safe="") if options.uds else str(options.port)
    cache = cache_folder()
    return None if cache is None or name == "0" else cache / "serve" / name


def _settings(options: ServeOptions) -> ServerSettings:
    from tidemill.server.settings import ServerSettings

    given: dict[str, Any] = {
        "max_queued_requests": options.max_queued_requests,
        "max_body_bytes": options.max_body_bytes,
        "drain_seconds": options.drain_timeout,
        "ssl_certfile": options.ssl_certfile,
        "ssl_keyfile": options.ssl_keyfile,
    }
    return ServerSettings(
        host=options.host,
        port=options.port,
        uds=options.uds,
        api_keys=options.api_keys,
        allowed_origins=options.allowed_origins,
        allowed_hosts=options.allowed_hosts,
        **{name: value for name, value in given.items() if value is not None},
    )
