"""`--model s3://bucket/prefix`: the folder on this machine that stands for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cli.errors import CliError, EngineFailed, Refused
from cli.extras import not_installed
from cli.terminal import say

if TYPE_CHECKING:
    from engine.config import LoraModule
    from handler.aws.sync import Aws
    from handler.weights.cache import Progress

VARIABLE = "TIDEMILL_WEIGHTS_CACHE"

_SCHEME = "s3://"
_TELL_SECONDS = 5.0


def addresses(model: str | None, adapters: Iterable[LoraModule]) -> list[str]:
    """Return what of a model and its adapters is in S3, and has to be fetched."""
    named = (model or "", *(adapter.path for adapter in adapters))
    return [name for name in dict.fromkeys(named) if name.startswith(_SCHEME)]


@contextmanager
def local_model(
    model: str, cache: str | None, watch: Callable[[Progress], None], region: str | None = None
) -> Iterator[str]:
    """Yield where a model is on this machine; one that S3 has is fetched if it must be.

    While entered, nobody removes it. `watch` is called about every second while it is fetched.
    Raises CliError when it cannot be had, or is not in the `region`, where one is given; the empty
    one is that of this process.
    """
    if not model.startswith(_SCHEME):
        yield model
        return
    with ExitStack() as stack:
        yield str(_enter(stack, model, cache, watch, region))


def _enter(
    stack: ExitStack,
    model: str,
    cache: str | None,
    watch: Callable[[Progress], None],
    region: str | None,
) -> Path:
    try:
        from botocore.exceptions import BotoCoreError

        from handler.weights.cache import local_weights
        from handler.weights.manifest import Location, WeightsRefused
    except ModuleNotFoundError as exc:
        raise not_installed(model, [str(exc.name)], "cloud") from exc
    try:
        location = Location.parse(model)
    except WeightsRefused as exc:
        raise Refused(str(exc)) from exc
    try:
        folder = _cache_folder(cache)
        aws = _aws_in(region)
        return stack.enter_context(local_weights(aws, location, folder, watch, region))
    except WeightsRefused as exc:
        raise EngineFailed(str(exc)) from exc
    except BotoCoreError as exc:
        raise CliError(f"AWS cannot be used: {exc}") from exc


def _aws_in(region: str | None) -> Aws:
    """Return who reads from another region, by an address that is reached by IPv6, too.

    Workers in a network without addresses of IPv4 have a gateway to S3 in their own region alone.
    """
    from botocore.config import Config

    from handler.aws.sync import Aws, aws_client

    if not region:
        return Aws()
    # An endpoint of S3 that is given has one address; those of other services say nothing of it.
    is_given = {"AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"} & os.environ.keys()
    far = Config(use_dualstack_endpoint=not is_given)
    return Aws(
        lambda service, config: aws_client(service, region_name=region, config=config.merge(far))
    )


def _cache_folder(given: str | None) -> Path:
    """Return where weights are kept: as the flag says, or the variable, or in the home folder."""
    if named := given or os.environ.get(VARIABLE):
        return Path(named).absolute()
    return Path.home() / ".cache" / "tidemill" / "weights"


def every_few_seconds(tell: Callable[[Progress], None]) -> Callable[[Progress], None]:
    """Return what tells of progress at once and then not more often than a person reads."""
    told_at = -_TELL_SECONDS

    def watch(progress: Progress) -> None:
        nonlocal told_at
        if time.monotonic() >= told_at + _TELL_SECONDS:
            told_at = time.monotonic()
            tell(progress)

    return watch


def say_progress(progress: Progress) -> None:
    """Tell the person at the terminal how far weights are."""
    from handler.weights.cache import gigabytes

    if progress.is_waiting:
        say("another process fetches the weights; waiting for it")
    else:
        done, total = gigabytes(progress.num_bytes), gigabytes(progress.total_bytes)
        say(f"fetching the weights: {done} of {total}")
