"""Engine process of a worker, a run or a program: `python -m tidemill.offline.engine.process`.

Its parent survives if a request, the system or a driver kills the engine.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from tidemill.engine_process.child import serve
from tidemill.protocol.contract import EngineError

from ..arguments.default_flags import add_default_flags, defaults_of
from ..arguments.defaults import DefaultingServed
from ..console.errors import CliError
from .engine import chat_template, engine_config, load_engine, served_names
from .options import EngineOptions, add_engine_flags, engine_fields
from .weights import s3_addresses

if TYPE_CHECKING:
    from tidemill.protocol.contract import Served


def make_parser() -> argparse.ArgumentParser:
    """Return the parser: engine flags, and inherited file descriptors."""
    parser = argparse.ArgumentParser(
        prog="python -m tidemill.offline.engine.process", allow_abbrev=False
    )
    parser.add_argument("--reader-fd", type=int, required=True, metavar="N")
    parser.add_argument("--writer-fd", type=int, required=True, metavar="N")
    parser.add_argument("--liveness-fd", type=int, metavar="N")
    parser.add_argument("--cpus", metavar="N,N", help="run on these cores")
    parser.add_argument(
        "--own-weights", action="store_true", help="download weights, because the parent does not"
    )
    parser.add_argument("--media-seconds", type=float, default=0, help="wait for media in S3")
    parser.add_argument("--dialect", choices=("openai", "vllm"), default="openai")
    add_default_flags(parser)
    add_engine_flags(parser)
    return parser


def load(
    options: EngineOptions,
    fetched: Callable[[], Mapping[str, str]] | None,
    *,
    media_seconds: float = 0,
) -> Served:
    """Load the engine of the options; raises EngineError.

    Libraries and the device load while the parent downloads weights from S3, for which `fetched`
    waits. It is None if the parent does not download any. `media_seconds` is as in `engine_config`.
    """
    try:
        config = engine_config(options, media_seconds=media_seconds)
        return load_engine(
            config,
            served_names=served_names(options),
            chat_template=chat_template(options),
            weights_cache=options.weights_cache,
            fetched=fetched if s3_addresses(config.model, config.lora_modules) else None,
        )
    except CliError as exc:
        raise EngineError(str(exc)) from exc


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Serve until the parent is gone or the engine fails."""
    parsed = make_parser().parse_args(arguments)
    options = EngineOptions(**engine_fields(parsed))
    defaults = defaults_of(parsed)
    if parsed.cpus is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(cpu) for cpu in parsed.cpus.split(",")})

    def load_with_defaults(fetched: Callable[[], Mapping[str, str]]) -> Served:
        given = None if parsed.own_weights else fetched
        served = load(options, given, media_seconds=parsed.media_seconds)
        return DefaultingServed(served, defaults) if defaults.flags else served

    serve(
        load_with_defaults,
        reader_fd=parsed.reader_fd,
        writer_fd=parsed.writer_fd,
        liveness_fd=parsed.liveness_fd,
        dialect=parsed.dialect,
    )


if __name__ == "__main__":
    main()
