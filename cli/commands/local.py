"""`tidemill local`: runs the whole cloud on an AWS emulator; needs a checkout."""

from __future__ import annotations

import argparse
import itertools
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tidemill.offline.arguments.argument_types import positive_int
from tidemill.offline.arguments.recipe_flags import add_recipe_flags
from tidemill.offline.console.errors import BadInput, CliError, Refused
from tidemill.offline.console.signals import StopSignals
from tidemill.offline.console.terminal import amount, log
from tidemill.offline.engine.adapters import lora_modules
from tidemill.offline.engine.demo_model import VARIABLE, demo_model
from tidemill.offline.engine.engine import check_model, served_names
from tidemill.offline.engine.options import (
    EngineOptions,
    add_engine_flags,
    engine_arguments,
    engine_fields,
)

if TYPE_CHECKING:
    from localstack.local import LocalCloud

_RUN_SECONDS = 24 * 3600
_CHECK_SECONDS = 1.0
# With `up`, an idle worker saves a start for the next file; `run` drops all files at once.
_UP_IDLE_SECONDS, _RUN_IDLE_SECONDS = 60.0, 2.0
_LAST_SECONDS = 10.0
_MAX_LOST = 3
_DOWN = "the cloud is down"
_ANSWER = "stopping the workers and the emulator; press Ctrl-C again to end them at once"


class CloudGone(CliError):
    """The local cloud ended and lost its data."""

    code = "cloud_lost"


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `local` to the command line."""
    parser = commands.add_parser(
        "local",
        help="run the whole cloud on this machine",
        description="Deploy the real stacks to an AWS emulator on this machine and run "
        "workers. Needs a checkout in which `make demo` has run.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    up = actions.add_parser(
        "up",
        help="run the cloud until Ctrl-C",
        description="Run the cloud until Ctrl-C, and print where to drop files.",
        allow_abbrev=False,
    )
    up.set_defaults(command=command_up, idle_seconds=_UP_IDLE_SECONDS)
    run = actions.add_parser(
        "run",
        help="run files and tables through the cloud, then stop it",
        description="Run files and tables through the cloud: drop them, follow their batches, and "
        "fetch all rows in the order of their lines.",
        allow_abbrev=False,
    )
    run.add_argument(
        "-i",
        "--input-file",
        dest="input_files",
        nargs="+",
        required=True,
        metavar="FILE",
        help="drop these files",
    )
    run.add_argument(
        "-o",
        "--output-file",
        dest="output_files",
        nargs="+",
        metavar="FILE",
        help="write the rows of each file here (default: FILE.output.jsonl or TABLE.output.csv "
        "next to it)",
    )
    run.add_argument("--force", action="store_true", help="overwrite an existing output")
    add_recipe_flags(run)
    run.set_defaults(command=command_run, idle_seconds=_RUN_IDLE_SECONDS, split=None, subset=None)
    for action in (up, run):
        _add_flags(action)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("cloud")
    group.add_argument(
        "--workers",
        type=positive_int,
        default=1,
        metavar="N",
        help="limit the workers per model, which start when there is work (default: 1)",
    )
    group.add_argument(
        "--config",
        type=Path,
        metavar="PATH",
        help="read this configuration (default: infra/config.toml)",
    )
    group.add_argument(
        "--port",
        type=positive_int,
        metavar="N",
        help="set the emulator's port (default: a free one)",
    )
    group.add_argument("--state", type=Path, metavar="FOLDER", help="store the cloud's state here")
    add_engine_flags(parser)


def command_up(arguments: argparse.Namespace) -> int:
    """Run the cloud until a signal; the exit status is then 130 or 143."""
    num_lost = 0
    while True:
        try:
            with StopSignals(_DOWN, answer=_ANSWER):
                _run_for_ever(arguments)
        except CloudGone as exc:
            num_lost += 1
            if num_lost > _MAX_LOST or arguments.state is not None:
                raise
            log(f"{exc}: starting an empty cloud with a new API key; use --state to keep it")


def _run_for_ever(arguments: argparse.Namespace) -> NoReturn:
    with _local_cloud(arguments) as cloud:
        sys.stdout.write(_guide(cloud))
        sys.stdout.flush()
        while True:
            cloud.supervise()
            time.sleep(_CHECK_SECONDS)


def command_run(arguments: argparse.Namespace) -> int:
    """Run files and tables through a separate cloud; return 0 if every line has a row."""
    files, outputs = (
        arguments.input_files,
        arguments.output_files or [None] * len(arguments.input_files),
    )
    if len(outputs) != len(files):
        raise Refused(f"-i lists {amount(len(files), 'file')}, but -o lists {len(outputs):,}")
    from ..api.objects import Batch
    from ..batches.follow import batch_progress
    from ..batches.local_drop import LocalDrop

    with StopSignals(_DOWN, answer=_ANSWER):
        # With --state, there may be earlier drops.
        names = (f"local-run-{time.time_ns():x}-{number}" for number in itertools.count(1))
        dropped = [
            LocalDrop.read(arguments, file, output, name)
            for file, output, name in zip(files, outputs, names, strict=False)
        ]
        with _local_cloud(arguments) as cloud, batch_progress() as show_batch:
            urls = [cloud.drop(each.name, each.body, each.recipe) for each in dropped]
            log(f"dropped {', '.join(files)}: waiting for {amount(len(urls), 'batch', 'batches')}")

            def show(fields: dict[str, Any]) -> None:
                show_batch(Batch(fields))

            failures = []
            for each, url in zip(dropped, urls, strict=True):
                try:
                    each.fetch(cloud, cloud.follow(url, seconds=_RUN_SECONDS, show=show))
                except BadInput as exc:
                    failures.append(str(exc))
            cloud.wait_until_idle(_LAST_SECONDS)
    if failures:
        raise BadInput("\n".join(failures))
    return 0


def _with_absolute_paths(engine: EngineOptions) -> EngineOptions:
    """Make paths absolute for workers, which run in the checkout; raises Refused."""
    if engine.model is not None:
        check_model(engine.model)
    paths: dict[str, Any] = {
        name: str(Path(given).resolve())
        for name in ("model", "chat_template", "weights_cache")
        if (given := getattr(engine, name)) is not None
        and (name == "weights_cache" or _is_there(given))
    }
    modules = [
        f"{name}={Path(path).resolve() if _is_there(path) else path}"
        for name, path in lora_modules(engine, served_names(engine))
    ]
    return replace(engine, **paths, lora_modules=tuple(modules))


def _model_names(engine: EngineOptions) -> tuple[str, tuple[str, ...]]:
    """Return the name that replaces the configured model's name, if any, and aliases.

    With `--model`, it is the first `--served-model-name`, or the model's folder or file name.
    """
    from tidemill.protocol.names import own_names  # late, for `--help`

    if engine.model is None:
        return "", engine.served_model_names
    if names := own_names(engine.served_model_names):
        return names[0], tuple(each for each in engine.served_model_names if each != names[0])
    path = Path(engine.model)
    if not _is_there(engine.model):
        return engine.model, engine.served_model_names
    return path.stem if path.is_file() else path.name, engine.served_model_names


def _is_there(name: str) -> bool:
    try:
        return Path(name).exists()
    except OSError:  # an inline template may be too long for a file name
        return False


@contextmanager
def _local_cloud(arguments: argparse.Namespace) -> Iterator[LocalCloud]:
    try:
        from infra.config import DEFAULT_PATH, ConfigRefused
        from infra.ops.client import ApiFailed
        from localstack.local import CloudLost, LocalOptions, WorkersBraked, running_cloud
        from localstack.ministack import EmulatorMissing, PortTaken, ServerEnded, ServerSilent
        from localstack.stacks import DeploymentFailed
        from localstack.state_folder import StateRefused
    except ModuleNotFoundError as exc:
        raise Refused(
            f"`tidemill local` needs {exc.name}, which is not installed: "
            "run `make demo` in a checkout of the repository"
        ) from exc
    engine = _with_absolute_paths(EngineOptions(**engine_fields(arguments)))
    any_model = ("*",) if engine.any_model else ()
    name, aliases = _model_names(engine)
    modules = lora_modules(engine, served_names(engine))
    options = LocalOptions(
        config=arguments.config or DEFAULT_PATH,
        workers=arguments.workers,
        idle_seconds=arguments.idle_seconds,
        engine_flags=engine_arguments(replace(engine, served_model_names=(), any_model=False)),
        model_name=name,
        aliases=(*aliases, *any_model),
        adapters=[module.name for module in modules],
        variables={} if engine.model is not None else {VARIABLE: str(Path(demo_model()).resolve())},
        port=arguments.port,
        state=arguments.state,
    )
    try:
        with running_cloud(options, log) as cloud:
            yield cloud
    except (ConfigRefused, EmulatorMissing, PortTaken, ServerEnded, StateRefused) as exc:
        raise Refused(str(exc)) from exc
    except (ApiFailed, DeploymentFailed, ServerSilent, WorkersBraked) as exc:
        raise CliError(str(exc)) from exc
    except CloudLost as exc:
        raise CloudGone(str(exc)) from exc


def _guide(cloud: LocalCloud) -> str:
    bucket = cloud.outputs.bucket
    return f"""
Bucket    s3://{bucket}
API       {cloud.api_url}/v1
API key   {cloud.key}
Dashboard {cloud.page_url}
Logs      {cloud.processes.folder}

export TIDEMILL_BASE_URL={shlex.quote(cloud.api_url)} TIDEMILL_API_KEY={cloud.key}
tidemill submit examples/demo.jsonl --wait     # the rows are in examples/demo.output.jsonl
tidemill status

export OPENAI_BASE_URL={shlex.quote(cloud.api_url)}/v1 OPENAI_API_KEY={cloud.key}

export AWS_ENDPOINT_URL={cloud.endpoint_url} AWS_DEFAULT_REGION=us-east-1 AWS_REGION=us-east-1
export AWS_ACCESS_KEY_ID=test AWS_SECRET_ACCESS_KEY=test
tidemill drop examples/demo.jsonl --bucket {bucket}
aws s3 sync s3://{bucket}/output out

Ctrl-C ends everything.
"""
