"""`tidemill serve`: a model behind a port, for OpenAI's clients."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from cli.errors import EngineFailed, Refused
from cli.extras import need_extras, not_installed
from cli.serving.engine import (
    Load,
    chat_template,
    engine_config,
    load_engine,
    loaded,
    need_engine,
    served_names,
)
from cli.serving.options import EngineOptions, add_engine_flags, engine_fields
from cli.signals import StopSignals
from cli.sizes import port_number, positive_int, size_in_bytes
from cli.terminal import say

if TYPE_CHECKING:
    from engine.contract import Online
    from server.local.here import Local
    from server.local.store import Store
    from server.means import Means
    from server.settings import ServerSettings

_EPILOG = """\
examples:
  tidemill serve                                       (the demo model, at port 8000)
  tidemill serve --model path/or/hub-id --port 8080
  curl localhost:8000/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Hello"}], "stream": true}'

TIDEMILL_SERVER_HOST and TIDEMILL_SERVER_PORT are the defaults of --host and --port. Flags that
TIDEMILL_SERVER_FLAGS holds stand before those that are typed, for containers started without any.
SIGTERM and Ctrl-C: requests that are being answered may finish, then it ends with 0.
"""
_KEYS = "TIDEMILL_SERVER_API_KEYS"
_FLAGS = "TIDEMILL_SERVER_FLAGS"
_SAGEMAKER_MODEL = Path("/opt/ml/model")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(EngineOptions):
    """All that a person can ask of one server; None leaves it to the server."""

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


def with_flags_of_environment(typed: Sequence[str]) -> list[str]:
    """Return what was typed with the flags that the environment holds for `serve`, if it is that.

    SageMaker starts a container with the word `serve` and nothing else. Raises Refused.
    """
    name, *rest = typed or [""]
    if name != "serve":
        return [*typed]
    try:
        return [name, *shlex.split(os.environ.get(_FLAGS, "")), *rest]
    except ValueError as exc:
        raise Refused(f"{_FLAGS} cannot be read: {str(exc).lower()}") from exc


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `serve` to the command line."""
    parser = commands.add_parser(
        "serve",
        help="answer requests over HTTP",
        description="Serves a model at a port, with the API of OpenAI.",
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
    add("--host", default=host, help="(default: 127.0.0.1; 0.0.0.0 is every address)")
    add("--port", type=port_number, default=port, help="0 takes a free one (default: 8000)")
    add("--uds", metavar="PATH", help="a Unix socket instead of a port")
    add("--ssl-keyfile", type=Path, metavar="FILE", help="serve https, with this key")
    add("--ssl-certfile", type=Path, metavar="FILE", help="and this certificate")
    add(
        "--api-key",
        nargs="+",
        dest="api_keys",
        metavar="KEY",
        help=f"let in only who has one of these (default: {_KEYS}, with spaces between)",
    )
    add(
        "--allowed-origins",
        nargs="+",
        default=(),
        metavar="ORIGIN",
        help="pages of these origins may ask; * is any (default: none)",
    )
    add(
        "--allowed-hosts",
        nargs="+",
        default=(),
        metavar="NAME",
        help="names by which a server without keys is asked; * is any (default: those of this "
        "machine at a loopback address, else any)",
    )
    add(
        "--max-queued-requests",
        type=positive_int,
        metavar="N",
        help="so many may wait for those that run; others are told to come again (default: 1024)",
    )
    add("--max-body-bytes", type=size_in_bytes, metavar="SIZE", help="of a request (default: 36M)")
    add(
        "--drain-timeout",
        type=positive_int,
        metavar="S",
        help="at SIGTERM, so many seconds for requests that are being answered (default: 30)",
    )
    add(
        "--data-dir",
        "--files-dir",
        type=Path,
        metavar="FOLDER",
        help="where files and batches are kept (default: ~/.cache/tidemill/serve/PORT)",
    )
    add("--max-file-bytes", type=size_in_bytes, metavar="SIZE", help="of an upload (default: 16G)")


def options_from(arguments: argparse.Namespace) -> ServeOptions:
    """Return the options that the parsed arguments ask for."""
    keys = arguments.api_keys or os.environ.get(_KEYS, "").split()
    # The empty one above all, which a variable that is not set leaves behind: it lets all in.
    if any(not re.fullmatch(r"[!-~]+", key) for key in keys):
        raise Refused("--api-key: a key is letters, digits and signs of ASCII, at least one")
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
        **engine_fields(arguments),
    )


def command(arguments: argparse.Namespace) -> int:
    """Serve until a signal comes, and return the exit status."""
    options = options_from(arguments)
    if options.model is None and (_SAGEMAKER_MODEL / "config.json").exists():
        options = replace(options, model=str(_SAGEMAKER_MODEL))
    if (options.ssl_certfile is None) != (options.ssl_keyfile is None):
        raise Refused("https takes both --ssl-certfile and --ssl-keyfile")
    need_engine("a server", options.model)
    need_extras("a server", "serve")
    load = partial(load_engine, weights_cache=options.weights_cache)
    return run_server(options, load=load)


def run_server(options: ServeOptions, *, load: Load[Online]) -> int:
    """Serve what `load` gives until a signal comes; raises CliError where that cannot be."""
    try:
        from server.app import make_app, make_means
        from server.local.here import make_local
        from server.serving import (
            CertificateRefused,
            allow_many_files,
            check_address,
            make_server,
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
        raise Refused(f"cannot listen at {where}: {exc.strerror or exc}") from exc
    with (
        StopSignals("nothing was served") as signals,
        _store(options) as store,
        loaded(load, config, names, template) as engine,
    ):
        means = make_means(engine, names, settings)
        local = make_local(store, engine, names, options.max_file_bytes)
        allow_many_files()
        make_server(
            make_app(means, local.routes),
            means.gate,
            settings,
            heard=signals.heard_by,
            listening=partial(
                _tell, names, engine.info().endpoints, has_keys=bool(options.api_keys)
            ),
            beside=partial(_beside, local, means),
        ).run()
    if means.gate.is_lost:
        raise EngineFailed("the engine cannot go on: start the server again")
    say("stopped")
    return 0


def _tell(names: Sequence[str], endpoints: Sequence[str], address: str, *, has_keys: bool) -> None:
    """Say where the server is, and how a program asks it."""
    say(f"serving {', '.join(names)} at {address}")
    if "://" not in address:
        return
    from server.guide import NO_KEY, YOUR_KEY, sdk_lines

    # An address that stands for all addresses is none to call.
    url = address.replace("://0.0.0.0", "://127.0.0.1").replace("://[::]", "://[::1]")
    key = YOUR_KEY if has_keys else NO_KEY
    lines = "\n".join(f"  {line}" for line in sdk_lines(url, names[0], endpoints, key))
    say(f"base URL for OpenAI's clients: {url}/v1\n{lines}")


@asynccontextmanager
async def _beside(local: Local, means: Means) -> AsyncIterator[None]:
    """Run batches, watch the engine and the loop, and touch the file that health is told by."""
    from cli.health import VARIABLE, Pulse
    from server.watching import watched

    file = os.environ.get(VARIABLE)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(Pulse(Path(file) if file else None).beating())
        await stack.enter_async_context(means.figures.loop_lag.measured())
        await stack.enter_async_context(watched(means.engine, means.gate))
        await stack.enter_async_context(local.at_work())
        yield


@contextmanager
def _store(options: ServeOptions) -> Iterator[Store]:
    """Hold the folder of files and batches, before a model is loaded; raises Refused.

    A server whose port nobody can know again has one that goes with it, and so has one that could
    not have the usual one, as in a container that may not write there.
    """
    from server.local.folder import FolderHeld, FolderRefused
    from server.local.store import open_store

    with ExitStack() as stack:
        folder = options.data_dir or _usual_folder(options)
        try:
            store = None if folder is None else stack.enter_context(open_store(folder))
        except FolderRefused as exc:
            if options.data_dir is not None or isinstance(exc, FolderHeld):
                raise Refused(f"{exc} (--data-dir)") from exc
            say(f"note: {exc}")
            store = None
        if store is None:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="tidemill-serve-")))
            say(f"files and batches are kept in {folder} until the end; --data-dir keeps them")
            store = stack.enter_context(open_store(folder))
        yield store


def _usual_folder(options: ServeOptions) -> Path | None:
    from engine.remembered import cache_folder

    name = quote(options.uds, safe="") if options.uds else str(options.port)
    cache = cache_folder()
    return None if cache is None or name == "0" else cache / "serve" / name


def _settings(options: ServeOptions) -> ServerSettings:
    from server.settings import ServerSettings

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
