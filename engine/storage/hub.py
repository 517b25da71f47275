"""Hugging Face hub: finds a model's files in a folder, the hub's cache or by download.

Also checks once whether the hub can be reached: huggingface_hub would retry each file for a minute
and not say why. transformers could find files, too, but takes seconds to import.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

from ..errors import ModelRefused, first_line_of

_COMMIT = re.compile(r"snapshots/([0-9a-f]{40})/")
_CONFIGS = ("config.json", "adapter_config.json")
_SECONDS = 5.0


def find_file(model: str, name: str) -> Path | None:
    """Return a file of a folder or hub id, downloaded if needed; None where there is no such file.

    Raises `OSError` or `ValueError` with transformers' words when the hub has no such model or
    does not answer.
    """
    if os.path.isdir(model):  # noqa: PTH112 - it never raises
        path = Path(model, name)
        return path if os.path.isfile(path) else None  # noqa: PTH113
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(model, name))
    except EntryNotFoundError:
        return None
    except Exception:  # noqa: BLE001 - transformers tries again and words each error
        return _find_with_transformers(model, name)


def find_folder(model: str) -> Path | None:
    """Return the folder of a model's config.json; None where it is missing or out of reach."""
    try:
        config = find_file(model, "config.json")
    except (OSError, ValueError):  # reported when the model is loaded
        return None
    return config and config.parent


def snapshot_commit(folder: Path) -> str | None:
    """Return the commit of a snapshot folder of the hub's cache; None for any other folder."""
    found = _COMMIT.search(f"{folder.as_posix()}/")
    return found and found[1]


def file_origin(model: str, folder: Path, names: Iterable[str]) -> str | None:
    """Return "folder", "cache" or "hub", a model's origin; None if `names` may be incomplete.

    transformers loads without a file for which the hub did not answer, and asks again at the next
    load. So a snapshot is complete where the cache knows of each name that it exists or does not,
    or where the hub is offline.
    """
    if os.path.isdir(model):  # noqa: PTH112 - it never raises
        return "folder"
    from huggingface_hub import is_offline_mode, try_to_load_from_cache

    if is_offline_mode():
        return "cache"
    revision = snapshot_commit(folder)
    known = [try_to_load_from_cache(model, name, revision=revision) for name in names]
    return None if None in known else "hub"


def local_folder(model: str) -> Path | None:
    """Return a model's folder, or its snapshot in the hub's cache; None without one."""
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
    """Check once that the hub is reachable, if models come from it; go offline or raise if not.

    Where it cannot be reached but the cache holds all models, this process goes offline (and so do
    its children, by `child_environment`) and the warning that says so is returned. Raises
    `ModelRefused` within `seconds` otherwise.
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
    fault = _connection_error(f"{constants.ENDPOINT}/{ids[0]}/resolve/main/config.json", seconds)
    if fault is None:
        return None
    why = f"the hub at {constants.ENDPOINT} cannot be reached ({fault})"
    if absent is not None:
        raise _refusal(absent, f"{why}; HTTPS_PROXY names a proxy and HF_ENDPOINT a mirror")
    constants.HF_HUB_OFFLINE = True
    return f"{why}: {', '.join(ids)} is taken from the cache"


def child_environment() -> dict[str, str]:
    """Return the environment of a process that shares the model: offline if this one is."""
    from huggingface_hub import is_offline_mode

    return {**os.environ, **({"HF_HUB_OFFLINE": "1"} if is_offline_mode() else {})}


def _find_with_transformers(model: str, name: str) -> Path | None:
    from transformers.utils import cached_file

    found = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def _refusal(model: str, why: str) -> ModelRefused:
    return ModelRefused(
        f"{model} is neither a folder here nor in the cache of the hub, and {why}. A folder that "
        "was copied from another machine can be named instead"
    )


def _connection_error(url: str, seconds: float) -> str | None:
    """Return the connection error of a URL; None when it responds, with whatever status."""
    answered: SimpleQueue[str | None] = SimpleQueue()

    def ask() -> None:
        from huggingface_hub import get_session

        try:
            get_session().head(url, timeout=2 * seconds, follow_redirects=False)
        except Exception as exc:  # noqa: BLE001 - httpx or requests, as the hub's library has it
            answered.put(first_line_of(exc))
        else:
            answered.put(None)

    # The timeout does not cover a DNS server that does not answer.
    Thread(target=ask, name="hub", daemon=True).start()
    try:
        return answered.get(timeout=seconds)
    except Empty:
        return f"no answer within {seconds:g} s"
