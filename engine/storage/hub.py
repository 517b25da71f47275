"""Hugging Face hub: finds a model's files in a folder, the hub's cache or by download.

A GGUF file stands for the folder that it is unpacked to.
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

from tidemill.protocol.gguf_names import SUFFIX

from ..errors import ModelRefused, first_line_of
from .gguf.unpacked import description_folder, gguf_file, only_name

_COMMIT = re.compile(r"snapshots/([0-9a-f]{40})/")
_CONFIGS = ("config.json", "adapter_config.json")
_SECONDS = 5.0


def find_file(model: str, name: str) -> Path | None:
    """Return a file of a folder or hub id, downloaded if needed; None where there is no such file.

    Raises `OSError` or `ValueError` with transformers' words when the hub has no such model or
    does not answer, and `ModelRefused` for a GGUF file that is not supported.
    """
    folder = unpacked_folder(model)
    if folder is not None:
        path = folder / name
        return path if os.path.isfile(path) else None  # noqa: PTH113 - it never raises
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(model, name))
    except EntryNotFoundError:
        if name != _CONFIGS[0] or not _fetch_gguf(model):
            return None
        return find_file(model, name)
    except Exception:  # noqa: BLE001 - transformers tries again and words each error
        return _find_with_transformers(model, name)


def unpacked_folder(model: str) -> Path | None:
    """Return a model's folder on this machine in transformers' format; None for one of the hub.

    A GGUF file is unpacked but for its weights; `ModelRefused` says why one is not supported.
    """
    file = find_gguf(model)
    if file is not None:
        return description_folder(file)
    return Path(model) if os.path.isdir(model) else None  # noqa: PTH112 - it never raises


def find_gguf(model: str) -> Path | None:
    """Return the GGUF file that a model is on this machine; None for transformers' format.

    A hub id is one where the hub has no config.json for it, and its only GGUF file was fetched.
    """
    is_here = os.path.isdir(model) or os.path.isfile(model)  # noqa: PTH112, PTH113
    if is_here or model.lower().endswith(SUFFIX) or "://" in model:
        return gguf_file(model)
    from huggingface_hub import _CACHED_NO_EXIST, snapshot_download, try_to_load_from_cache

    try:
        if try_to_load_from_cache(model, _CONFIGS[0]) is not _CACHED_NO_EXIST:
            return None
        return gguf_file(snapshot_download(model, local_files_only=True))
    except (OSError, ValueError):
        return None


def local_source(model: str) -> Path | None:
    """Return what identifies a model on this machine: its GGUF file, or its folder; None without.

    Nothing is unpacked or fetched.
    """
    return find_gguf(model) or local_folder(model)


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
    if unpacked_folder(model) is not None:
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
    ids = [
        model
        for model in models
        if not ("://" in model or os.path.isdir(model) or model.lower().endswith(SUFFIX))  # noqa: PTH112
    ]
    if not ids:
        return None
    from huggingface_hub import constants, is_offline_mode

    absent = next((model for model in ids if local_source(model) is None), None)
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


def _fetch_gguf(model: str) -> bool:
    """Fetch the only GGUF file of a hub id; False where it has none, or the hub does not answer."""
    from huggingface_hub import HfApi, constants, hf_hub_download

    try:
        siblings = HfApi(endpoint=constants.ENDPOINT).model_info(model, timeout=_SECONDS).siblings
    except Exception:  # noqa: BLE001 - what is wrong is told for the missing config.json
        return False
    names = (sibling.rfilename for sibling in siblings or ())
    name = only_name(model, (name for name in names if "/" not in name))
    if name is None:
        return False
    try:
        hf_hub_download(model, name)
    except Exception as exc:
        raise ModelRefused(f"{model}: {name} cannot be fetched: {first_line_of(exc)}") from exc
    return find_gguf(model) is not None


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
