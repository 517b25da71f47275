"""Where a model's files lie: in its folder, or in the hub's snapshot of it on this machine.

transformers would tell the same, but takes seconds to import; it is asked for its words alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

_COMMIT = re.compile(r"snapshots/([0-9a-f]{40})/")


def find_file(model: str, name: str) -> Path | None:
    """Return a file of a folder or hub id, fetched if need be; None where there is no such file.

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
    except Exception:  # noqa: BLE001 - transformers looks at each again
        return _found_by_transformers(model, name)


def find_folder(model: str) -> Path | None:
    """Return where a model's config.json lies, or None where there is none or none can be had."""
    try:
        config = find_file(model, "config.json")
    except (OSError, ValueError):  # said by whoever reads the model
        return None
    return config and config.parent


def revision_of(folder: Path) -> str | None:
    """Return the commit of a folder that is a snapshot of the hub's cache, or lies like one."""
    found = _COMMIT.search(f"{folder.as_posix()}/")
    return found and found[1]


def source_of(model: str, folder: Path, names: Iterable[str]) -> str | None:
    """Return a word for where a model's files come from; None when more of `names` may come yet.

    transformers does without a file that a hub does not answer for, and asks again at the next
    load. So a snapshot is whole where the hub has said of each that it is there or is not, or
    where the hub is not to be asked.
    """
    if os.path.isdir(model):  # noqa: PTH112 - it never raises
        return "folder"
    from huggingface_hub import is_offline_mode, try_to_load_from_cache

    if is_offline_mode():
        return "cache"
    revision = revision_of(folder)
    known = [try_to_load_from_cache(model, name, revision=revision) for name in names]
    return None if None in known else "hub"


def _found_by_transformers(model: str, name: str) -> Path | None:
    from transformers.utils import cached_file

    found = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)
