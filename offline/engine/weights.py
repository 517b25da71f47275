"""Model weights from S3: `--model s3://bucket/prefix`, downloaded to a local cache."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..console.errors import CliError, EngineFailed, Refused
from ..console.terminal import log
from ..extras import not_installed

if TYPE_CHECKING:
    from tidemill.engine.config import LoraModule
    from tidemill.handler.aws.sync import Aws
    from tidemill.handler.worker.weights.cache import DownloadProgress
    from tidemill.handler.worker.weights.manifest import Location

VARIABLE = "TIDEMILL_WEIGHTS_CACHE"

_SCHEME = "s3://"
_REPORT_SECONDS = 5.0


def s3_addresses(model: str | None, adapters: Iterable[LoraModule]) -> list[str]:
    """Return the S3 addresses among a model and its adapters."""
    named = (model or "", *(adapter.path for adapter in adapters))
    return [name for name in dict.fromkeys(named) if name.startswith(_SCHEME)]


@contextmanager
def local_model(
    model: str,
    cache: str | None,
    watch: Callable[[DownloadProgress], None],
    region: str | None = None,
) -> Iterator[str]:
    """Yield the local folder of a model, downloaded from S3 if needed.

    It stays in the cache inside the context. `watch` is called about once a second during the
    download. Raises CliError if it cannot be downloaded, or is not in `region`, if given; an empty
    `region` means this process's region.
    """
    if not model.startswith(_SCHEME):
        yield model
        return
    with ExitStack() as stack:
        yield str(_enter(stack, model, cache, watch, region))


def check_weights(model: str) -> None:
    """Raise CliError for a model in S3 that does not exist or cannot be listed."""
    with _refusals(model):
        from tidemill.handler.worker.weights.manifest import find_weights

        _aws_in(None).run(find_weights(_location(model)))


def _enter(
    stack: ExitStack,
    model: str,
    cache: str | None,
    watch: Callable[[DownloadProgress], None],
    region: str | None,
) -> Path:
    with _refusals(model):
        from tidemill.handler.aws.s3_store import find_store
        from tidemill.handler.worker.weights.cache import local_weights

        location = _location(model)
        folder = _cache_folder(cache)
        # Only AWS has regions; other stores are not checked.
        region = region if find_store().is_aws else None
        aws = _aws_in(region)
        return stack.enter_context(local_weights(aws, location, folder, watch, region))


def _location(model: str) -> Location:
    from tidemill.handler.worker.weights.manifest import Location, WeightsRefused

    try:
        return Location.parse(model)
    except WeightsRefused as exc:
        raise Refused(str(exc)) from exc


@contextmanager
def _refusals(model: str) -> Iterator[None]:
    """Raise CliError for a model in S3 that cannot be used inside the context."""
    try:
        from botocore.exceptions import BotoCoreError

        from tidemill.handler.worker.weights.manifest import WeightsRefused
    except ModuleNotFoundError as exc:
        raise not_installed(model, [str(exc.name)], "cloud") from exc
    try:
        yield
    except WeightsRefused as exc:
        raise EngineFailed(str(exc)) from exc
    except BotoCoreError as exc:
        raise CliError(f"an AWS call failed: {exc}") from exc


def _aws_in(region: str | None) -> Aws:
    """Return clients for a region, with dual-stack endpoints if it is another one.

    Workers in a network without IPv4 addresses have an S3 gateway only for their own region.
    """
    from botocore.config import Config

    from tidemill.handler.aws.s3_store import find_store
    from tidemill.handler.aws.sync import Aws, aws_client

    if not region:
        return Aws()
    # A custom S3 endpoint has no dual-stack variant; other services' endpoints do not matter.
    far = Config(use_dualstack_endpoint=find_store().endpoint_url is None)
    return Aws(
        lambda service, config: aws_client(service, region_name=region, config=config.merge(far))
    )


def _cache_folder(given: str | None) -> Path:
    """Return the weights' cache folder, from flag, variable or home folder."""
    if named := given or os.environ.get(VARIABLE):
        return Path(named).absolute()
    return Path.home() / ".cache" / "tidemill" / "weights"


def throttled(report: Callable[[DownloadProgress], None]) -> Callable[[DownloadProgress], None]:
    """Return a rate-limited `report`: called immediately, then every few seconds."""
    reported_at = -_REPORT_SECONDS

    def watch(progress: DownloadProgress) -> None:
        nonlocal reported_at
        if time.monotonic() >= reported_at + _REPORT_SECONDS:
            reported_at = time.monotonic()
            report(progress)

    return watch


def log_progress(progress: DownloadProgress) -> None:
    """Log the progress of a weights download."""
    from tidemill.handler.worker.weights.cache import gigabytes

    if progress.is_waiting:
        log("waiting for another process that is downloading the weights")
    else:
        done, total = gigabytes(progress.num_bytes), gigabytes(progress.total_bytes)
        log(f"downloading the weights: {done} of {total}")
