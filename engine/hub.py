"""The hub of models: whether it can be reached, and what of it this machine's cache holds.

huggingface_hub would try each file again for a minute before it gives up, and not say why.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

from engine.errors import ModelRefused, first_line_of

_CONFIGS = ("config.json", "adapter_config.json")
_SECONDS = 5.0


def local_folder(model: str) -> Path | None:
    """Return a model's folder, or the hub's snapshot of it on this machine; None without one."""
    if os.path.isdir(model):  # noqa: PTH112 - it never raises
        return Path(model)
    from huggingface_hub import try_to_load_from_cache

    for name in _CONFIGS:
        try:
            found = try_to_load_from_cache(model, name)
        except (OSError, ValueError):  # no id of a model
            return None
        if isinstance(found, str):
            return Path(found).parent
    return None


def check_hub(models: Iterable[str], seconds: float = _SECONDS) -> str | None:
    """Ask the hub once whether it is there, where models come from it; raise if it is needed.

    Where it cannot be reached but the cache holds all the models, the hub is not asked again and
    the sentence that says so is returned. Raises `ModelRefused` within `seconds` otherwise.
    """
    ids = [model for model in models if "://" not in model and not os.path.isdir(model)]  # noqa: PTH112
    if not ids:
        return None
    from huggingface_hub import constants, is_offline_mode

    absent = next((model for model in ids if local_folder(model) is None), None)
    if is_offline_mode():
        if absent is not None:
            raise _refusal(absent, "HF_HUB_OFFLINE keeps it from being fetched from the hub")
        return None
    fault = _fault_of_hub(f"{constants.ENDPOINT}/{ids[0]}/resolve/main/config.json", seconds)
    if fault is None:
        return None
    why = f"the hub at {constants.ENDPOINT} cannot be reached ({fault})"
    if absent is not None:
        raise _refusal(absent, f"{why}; HTTPS_PROXY names a proxy and HF_ENDPOINT a mirror")
    constants.HF_HUB_OFFLINE = True
    os.environ["HF_HUB_OFFLINE"] = "1"  # for the processes that share the model
    return f"{why}: {', '.join(ids)} is taken from the cache"


def _refusal(model: str, why: str) -> ModelRefused:
    return ModelRefused(
        f"{model} is neither a folder here nor in the cache of the hub, and {why}. A folder that "
        "was copied from another machine can be named instead"
    )


def _fault_of_hub(url: str, seconds: float) -> str | None:
    """Return why nothing answers at a URL; None when something does, whatever it says."""
    answered: SimpleQueue[str | None] = SimpleQueue()

    def ask() -> None:
        from huggingface_hub import get_session

        try:
            get_session().head(url, timeout=2 * seconds, follow_redirects=False)
        except Exception as exc:  # noqa: BLE001 - of whichever client the hub's library has
            answered.put(first_line_of(exc))
        else:
            answered.put(None)

    # A name server that does not answer heeds no timeout.
    Thread(target=ask, name="hub", daemon=True).start()
    try:
        return answered.get(timeout=seconds)
    except Empty:
        return f"no answer within {seconds:g} s"
