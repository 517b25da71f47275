"""Hugging Face hub: finds a model's files in a folder, in the hub's cache or by download.

A GGUF file is represented by the folder that it is unpacked to.

This module also checks once whether the hub can be reached: huggingface_hub would retry each file
for a minute without an explanation. transformers could also find files, but takes seconds to
import.
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
# A hub ID is a name, or a user's name and a name.
_PATH = re.compile(r"[./~\\]|[^/]*/[^/]*/|.*\\|[A-Za-z]:")
_CONFIGS = ("config.json", "adapter_config.json")
# Files of decision models whose encoder's config and tokenizer are in separate folders.
NESTED = ("rl_agent_config.json", "julia_config.json")
_ENCODER, _TOKENIZER = "encoder/config.json", "tokenizer"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_SECONDS = 5.0


def find_file(model: str, name: str) -> Path | None:
    """Return a file of a folder or hub id, downloaded if needed; None if there is no such file.

    Raises `OSError` or `ValueError` with transformers' message if the hub has no such model or does
    not respond, and `ModelRefused` for an unsupported GGUF file.
    """
    folder = unpacked_folder(model)
    if folder is not None:
        path = config_of(folder) if name == _CONFIGS[0] else folder / name
        return path if os.path.isfile(path) else None  # noqa: PTH113 - it never raises
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        path = Path(hf_hub_download(model, name))
        if name != _CONFIGS[0] or b'"model_type"' in path.read_bytes():
            return path
        return _nested_config(model) or path
    except EntryNotFoundError:
        if name != _CONFIGS[0]:
            return None
        if (nested := _nested_config(model)) is not None:
            return nested
        return find_file(model, name) if _fetch_gguf(model) else None
    except Exception:  # noqa: BLE001 - transformers tries again, and explains each error
        return _find_with_transformers(model, name)


def _nested_config(model: str) -> Path | None:
    """Return the encoder's config.json of a hub id with a nested layout."""
    is_model = any(find_file(model, name) is not None for name in NESTED)
    return find_file(model, _ENCODER) if is_model else None


def config_of(folder: Path) -> Path:
    """Return the path of the config.json in a model's folder, whether or not it exists."""
    return folder / (_ENCODER if is_nested(folder) else _CONFIGS[0])


def is_nested(folder: Path) -> bool:
    """Return whether a model's encoder config and tokenizer are in separate folders."""
    return any((folder / name).is_file() for name in NESTED)


def tokenizer_source(model: str, folder: Path | None) -> tuple[str, Path | None]:
    """Return the folder or hub id of a model's tokenizer, and the folder with its files."""
    if folder is None or not is_nested(folder):
        return str(unpacked_folder(model) or model), folder
    for name in _TOKENIZER_FILES:
        find_file(model, f"{_TOKENIZER}/{name}")  # fetches it
    return str(folder / _TOKENIZER), folder / _TOKENIZER


def unpacked_folder(model: str) -> Path | None:
    """Return a model's local folder in transformers' format; None for a hub id.

    A GGUF file is unpacked except for its weights; raises `ModelRefused` for an unsupported one.
    """
    file = find_gguf(model)
    if file is not None:
        return description_folder(file)
    return Path(model) if os.path.isdir(model) else None  # noqa: PTH112 - it never raises


def find_gguf(model: str) -> Path | None:
    """Return the local GGUF file of a model; None for transformers' format.

    A hub id has one if the hub has no config.json for it, and its only GGUF file was fetched.
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
    """Return a model's local source: its GGUF file or its folder, or None.

    Nothing is unpacked or fetched.
    """
    return find_gguf(model) or local_folder(model)


def find_folder(model: str) -> Path | None:
    """Return the folder of a model with its config.json; None if that is missing or unreachable."""
    try:
        config = find_file(model, "config.json")
    except (OSError, ValueError):  # reported when the model is loaded
        return None
    if config is None:
        return None
    folder = config.parent
    has_encoder = folder != unpacked_folder(model) and is_nested(folder.parent)
    return folder.parent if has_encoder else folder


def snapshot_commit(folder: Path) -> str | None:
    """Return the commit of a snapshot folder of the hub's cache; None for any other folder."""
    match = _COMMIT.search(f"{folder.as_posix()}/")
    return match and match[1]


def file_origin(model: str, folder: Path, names: Iterable[str]) -> str | None:
    """Return "folder", "cache" or "hub", a model's origin; None if `names` may be incomplete.

    transformers loads without a file for which the hub did not respond, and tries again at the next
    load. So a snapshot is complete if the cache has recorded for each name whether it exists, or if
    the hub is offline.
    """
    if unpacked_folder(model) is not None:
        return "folder"
    from huggingface_hub import is_offline_mode, try_to_load_from_cache

    if is_offline_mode():
        return "cache"
    revision = snapshot_commit(folder)
    cached = [try_to_load_from_cache(model, name, revision=revision) for name in names]
    return None if None in cached else "hub"


def local_folder(model: str) -> Path | None:
    """Return a model's folder, or its snapshot in the hub's cache; None without one."""
    if os.path.isdir(model):  # noqa: PTH112 - it never raises
        return Path(model)
    from huggingface_hub import try_to_load_from_cache

    for name in _CONFIGS:
        try:
            path = try_to_load_from_cache(model, name)
        except (OSError, ValueError):  # not a model id
            return None
        if isinstance(path, str):
            return Path(path).parent
    return None


def check_hub(models: Iterable[str], seconds: float = _SECONDS) -> str | None:
    """Check once that the hub is reachable, if models come from it; otherwise go offline or raise.

    If it is unreachable but the cache has all models, this process goes offline (and so do its
    children, through `child_environment`), and a warning is returned. Otherwise raises
    `ModelRefused` within `seconds`.
    """
    ids = [
        model
        for model in models
        if not ("://" in model or os.path.isdir(model) or model.lower().endswith(SUFFIX))  # noqa: PTH112
    ]
    if not ids:
        return None
    for model in ids:
        if _PATH.match(model):
            is_file = os.path.exists(model)  # noqa: PTH110
            raise ModelRefused(
                f"{model} {'is not a folder' if is_file else 'does not exist'}: pass the path of "
                "a folder or GGUF file, or a hub ID such as Qwen/Qwen3-8B"
            )
    from huggingface_hub import constants, is_offline_mode

    absent = next((model for model in ids if local_source(model) is None), None)
    if is_offline_mode():
        if absent is not None:
            raise _refusal(absent, "HF_HUB_OFFLINE prevents a download")
        return None
    fault = _connection_error(f"{constants.ENDPOINT}/{ids[0]}/resolve/main/config.json", seconds)
    if fault is None:
        return None
    reason = f"the hub at {constants.ENDPOINT} cannot be reached ({fault})"
    if absent is not None:
        raise _refusal(absent, f"{reason}: set HTTPS_PROXY for a proxy or HF_ENDPOINT for a mirror")
    constants.HF_HUB_OFFLINE = True
    return f"{reason}: {', '.join(ids)} is loaded from the cache"


def child_environment() -> dict[str, str]:
    """Return the environment of a process that shares the model; it inherits offline mode."""
    from huggingface_hub import is_offline_mode

    return {**os.environ, **({"HF_HUB_OFFLINE": "1"} if is_offline_mode() else {})}


def _fetch_gguf(model: str) -> bool:
    """Fetch the only GGUF file of a hub id; False if it has none, or the hub does not respond."""
    from huggingface_hub import HfApi, constants, hf_hub_download

    try:
        siblings = HfApi(endpoint=constants.ENDPOINT).model_info(model, timeout=_SECONDS).siblings
    except Exception:  # noqa: BLE001 - the cause is reported for the missing config.json
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

    path = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
    return None if path is None else Path(path)


def _refusal(model: str, reason: str) -> ModelRefused:
    return ModelRefused(
        f"{model} is neither a local folder nor in the hub's cache, and {reason}. You can also "
        "pass the path of a folder copied from another machine"
    )


def _connection_error(url: str, seconds: float) -> str | None:
    """Return the connection error of a URL; None if it responds, with any status."""
    results: SimpleQueue[str | None] = SimpleQueue()

    def send_request() -> None:
        from huggingface_hub import get_session

        try:
            get_session().head(url, timeout=2 * seconds, follow_redirects=False)
        except Exception as exc:  # noqa: BLE001 - of httpx or requests, by the hub's version
            results.put(first_line_of(exc))
        else:
            results.put(None)

    # The timeout does not cover an unresponsive DNS server.
    Thread(target=send_request, name="hub", daemon=True).start()
    try:
        return results.get(timeout=seconds)
    except Empty:
        return f"no response within {seconds:g} s"
