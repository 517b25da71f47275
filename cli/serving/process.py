"""`python -m cli.serving.process`: an engine as a process of its own, which a worker starts.

The worker survives it: an engine may be killed by a request, by the system or by a driver.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from cli.errors import CliError
from cli.serving.engine import chat_template, engine_config, load_engine, served_names
from cli.serving.options import EngineOptions, add_engine_flags, engine_fields
from cli.serving.weights import addresses
from engine.errors import EngineError
from engine.process.child import serve

if TYPE_CHECKING:
    from engine.contract import Served


def make_parser() -> argparse.ArgumentParser:
    """Return the parser: the flags of the engine, and the descriptors that are inherited."""
    parser = argparse.ArgumentParser(prog="python -m cli.serving.process", allow_abbrev=False)
    parser.add_argument("--reader-fd", type=int, required=True, metavar="N")
    parser.add_argument("--writer-fd", type=int, required=True, metavar="N")
    parser.add_argument("--liveness-fd", type=int, metavar="N")
    add_engine_flags(parser)
    return parser


def load(options: EngineOptions, fetched: Callable[[], Mapping[str, str]]) -> Served:
    """Load the engine that the options ask for; raises EngineError when there can be none.

    Libraries and the device while whoever started this fetches what is in S3: `fetched` waits.
    """
    try:
        config = engine_config(options)
        return load_engine(
            config,
            served_names=served_names(options),
            chat_template=chat_template(options),
            fetched=fetched if addresses(config.model, config.lora_modules) else None,
        )
    except CliError as exc:
        raise EngineError(str(exc)) from exc


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Serve until the worker has gone or the engine cannot go on."""
    parsed = make_parser().parse_args(arguments)
    options = EngineOptions(**engine_fields(parsed))
    serve(
        lambda fetched: load(options, fetched),
        reader_fd=parsed.reader_fd,
        writer_fd=parsed.writer_fd,
        liveness_fd=parsed.liveness_fd,
    )


if __name__ == "__main__":
    main()
