"""`tidemill worker`: runs shards of batches from a queue, and writes rows to the bucket."""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tidemill.offline.console.errors import CliError, Refused, Stopped
from tidemill.offline.console.signals import StopSignals
from tidemill.offline.engine.adapters import lora_modules
from tidemill.offline.engine.data_parallel import (
    DataParallelSize,
    num_replicas,
    replica_commands,
)
from tidemill.offline.engine.demo_model import with_demo_model
from tidemill.offline.engine.engine import (
    chat_template,
    engine_config,
    results_digests,
    served_names,
)
from tidemill.offline.engine.options import (
    EngineOptions,
    engine_command,
    engine_fields,
    stall_limit,
)
from tidemill.offline.engine.weights import local_model, s3_addresses, throttled
from tidemill.offline.engine.worker_parser import (
    add_worker_flags,
    check_media_buckets,
    setting_errors,
)
from tidemill.offline.extras import not_installed, require_extras

FOLDER: Final = Path("/opt/ml/output")
_MAX_CHARS: Final = 1000


class _LastError(logging.Handler):
    """Log handler that stores the message of the last error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.words = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Store a record's message."""
        reason = getattr(record, "reason", None)
        self.words = f"{record.getMessage()}: {reason}" if reason else record.getMessage()


def write_failure_file(command: Callable[[], int], folder: Path = FOLDER) -> int:
    """Run a command; on failure write its last error to SageMaker's failure file.

    Exceptions of the command pass through.
    """
    if not folder.is_dir():
        return command()
    from tidemill.handler.observability import logger

    last = _LastError()
    worker_log = logging.getLogger(logger.name)
    worker_log.addHandler(last)
    try:
        status = command()
    except CliError as exc:
        _write_failure(folder, str(exc))
        raise
    except Exception as exc:
        _write_failure(folder, repr(exc))
        raise
    finally:
        worker_log.removeHandler(last)
    if status != 0:
        _write_failure(folder, last.words or f"ended with status {status}")
    return status


def _write_failure(folder: Path, words: str) -> None:
    with suppress(OSError):  # the folder may be another user's; best effort
        (folder / "failure").write_text(words[:_MAX_CHARS], encoding="utf-8")


if TYPE_CHECKING:
    from tidemill.handler.settings import Settings
    from tidemill.handler.worker.context.cold_start import ColdStart
    from tidemill.handler.worker.context.config import WorkerConfig
    from tidemill.handler.worker.main import WorkerEngines
    from tidemill.handler.worker.weights.cache import DownloadProgress

_EPILOG = """\
Each flag of the first three groups can be set with an environment variable: --lease-seconds is
TIDEMILL_LEASE_SECONDS. Flags take precedence. On SIGTERM, the worker returns unfinished work and
exits with 0.
"""
_WEIGHTS_REGION = "TIDEMILL_WEIGHTS_REGION"
_ENGINE_COMMAND = "TIDEMILL_ENGINE_COMMAND"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions(EngineOptions):
    """Options of a worker; `given` holds the flags that were set."""

    data_parallel_size: DataParallelSize = None
    given: Mapping[str, Any] = field(default_factory=dict)


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `worker` to the command line."""
    parser = commands.add_parser(
        "worker",
        help="run batches from a cloud deployment",
        description="Take shards of batches from a queue, run their lines through a model and "
        "write the rows to the bucket.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    settings = add_worker_flags(parser)
    parser.set_defaults(command=command, settings=settings)


def options_from(arguments: argparse.Namespace) -> WorkerOptions:
    """Return the options of the parsed arguments."""
    given = {name: getattr(arguments, name) for name in arguments.settings}
    given = {name: value for name, value in given.items() if value is not None}
    return WorkerOptions(
        **engine_fields(arguments),
        data_parallel_size=arguments.data_parallel_size,
        given=given,
    )


def command(arguments: argparse.Namespace) -> int:
    """Run the worker until a signal or idleness, and return the exit status."""
    return write_failure_file(partial(_until_stopped, options_from(arguments)))


def _until_stopped(options: WorkerOptions) -> int:
    try:
        with StopSignals() as signals:
            require_extras("a worker", "cloud", "engine")
            check_media_buckets(options.allowed_media_buckets)
            options = with_demo_model(options, may_download=False)
            settings, config = _read(options, os.environ)
            return _run(options, settings, config, signals)
    except Stopped:  # before there was work to release
        return 0
    except ModuleNotFoundError as exc:
        raise not_installed("a worker", [str(exc.name)], "cloud", "engine") from exc


def _read(options: WorkerOptions, environment: Mapping[str, str]) -> tuple[Settings, WorkerConfig]:
    """Return the settings of the environment with the flags applied; raises Refused."""
    from pydantic import ValidationError

    from tidemill.handler.settings import read_settings
    from tidemill.handler.worker.context.config import read_config

    given = dict(options.given)
    flags = {f"TIDEMILL_{name.upper()}": str(value) for name, value in given.items()}
    try:
        settings = read_settings({**environment, **flags})
        if "queue" not in given and "TIDEMILL_QUEUE" not in environment:
            names = served_names(options)
            queues = [queue for name in names if (queue := settings.work_queues.get(name))]
            if not queues:
                raise Refused(f"there is no work queue for {names[0]}: pass --queue")
            given["queue"] = queues[0]
        return settings, read_config(environment, given)
    except ValidationError as exc:
        raise Refused("\n".join(setting_errors(exc.errors()))) from exc


def _engine_command(options: EngineOptions, environment: Mapping[str, str]) -> list[str]:
    """Return the command of the engine process; replaced in tests."""
    if (other := environment.get(_ENGINE_COMMAND)) is not None:
        return [str(word) for word in json.loads(other)]
    return engine_command(options)


def _run(
    options: WorkerOptions, settings: Settings, config: WorkerConfig, signals: StopSignals
) -> int:
    import asyncio

    from botocore.exceptions import BotoCoreError

    from tidemill.batch.object_keys import MEDIA_PREFIX
    from tidemill.handler.worker.main import run_worker

    from ..health import VARIABLE, Heartbeat

    health_file = options.given.get("health_file") or os.environ.get(VARIABLE)
    pulse = Heartbeat(Path(health_file) if health_file else None)
    media = (f"{settings.bucket}/{MEDIA_PREFIX}",)  # `media_access` refuses other tenants' objects
    engines = _engines(replace(options, allowed_media_buckets=media))
    beating = pulse.beating()
    try:
        return asyncio.run(
            run_worker(settings, config, engines, beating=beating, on_signal=signals.on_signal)
        )
    except BotoCoreError as exc:
        raise CliError(f"an AWS call failed: {exc}") from exc


def _engines(options: WorkerOptions) -> WorkerEngines:
    """Return the engines that the options describe; raises Refused."""
    from tidemill.engine.storage.disk_cache import cache_folder
    from tidemill.handler.worker.main import WorkerEngines
    from tidemill.offline.engine.parity_cache import ParityCache

    names = served_names(options)
    adapters = lora_modules(options, names)
    addresses = s3_addresses(options.model, adapters)
    return WorkerEngines(
        commands=replica_commands(
            _engine_command(replace(options, served_model_names=names), os.environ),
            options,
            num_replicas(options, options.data_parallel_size),
        ),
        served_names=[*names, *(each.name for each in adapters)],
        stall_seconds=stall_limit(options),
        fetch_weights=partial(_fetch, addresses, options) if addresses else None,
        open_parity_cache=ParityCache if addresses and cache_folder() is not None else None,
        make_digest_at=lambda folders: results_digests(
            engine_config(options), chat_template(options), folders
        ),
    )


def _fetch(
    names: Sequence[str], options: WorkerOptions, held: AsyncExitStack, cold_start: ColdStart
) -> Mapping[str, str]:
    """Download weights and return their folders, which stay in the cache while `held` is open.

    Logs and raises CliError.
    """
    from tidemill.handler.observability import logger

    def log(name: str, progress: DownloadProgress) -> None:
        logger.info(
            "fetching weights",
            model=name,
            num_bytes=progress.num_bytes,
            total_bytes=progress.total_bytes,
            is_waiting=progress.is_waiting,
        )

    began, num_bytes = time.monotonic(), 0
    cache, folders = options.weights_cache, {}
    region = options.given.get("weights_region") or os.environ.get(_WEIGHTS_REGION, "")
    for name in names:
        watch = throttled(partial(log, name))
        try:
            folders[name] = held.enter_context(local_model(name, cache, watch, region))
        except CliError as exc:
            logger.error("weights not available", reason=str(exc))
            raise
        num_bytes += sum(path.stat().st_size for path in Path(folders[name]).iterdir())
    took = max(time.monotonic() - began, 0.001)
    cold_start.note(
        weights_seconds=round(took, 3),
        weights_gigabytes=round(num_bytes / 1e9, 3),
        weights_gigabytes_per_second=round(num_bytes / 1e9 / took, 3),
    )
    return folders
