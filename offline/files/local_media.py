"""Local media: files that a table's rows name by their paths become data URLs in its requests."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json

from tidemill.batch.file.lines import ROW_ERROR
from tidemill.batch.file.rows import escape_separators
from tidemill.protocol.fetched_urls import fetched_urls
from tidemill.protocol.urls import MAX_INLINE_BYTES


def with_local_media(line: bytes, folder: Path) -> bytes:
    """Return a table's line with the files that it names in `folder`, or the line of their error.

    Paths are relative to the folder, and no file outside it is read.
    """
    request = from_json(line)
    body = request.get("body") or {}
    paths = {place: url for place, url in fetched_urls(body).items() if "://" not in url}
    if not paths:
        return line
    try:
        for place, path in paths.items():
            _replace(body, place.split("."), path, _data_url(path, folder))
    except ValueError as exc:
        error = {"message": str(exc), "column": None}
        request = {"custom_id": request["custom_id"], ROW_ERROR: error}
    return escape_separators(to_json(request)) + b"\n"


def _data_url(path: str, folder: Path) -> str:
    """Return a file as a data URL; raises ValueError for one that cannot be read."""
    try:
        file = (folder / path.replace("\0", "")).resolve()
        if not file.is_relative_to(folder.resolve()):
            raise ValueError(f"the file `{path}` is outside the table's folder: move it there")
        if not file.is_file():
            raise ValueError(
                f"the file `{path}` does not exist: paths are relative to the table's folder"
            )
        if file.stat().st_size > MAX_INLINE_BYTES:
            raise ValueError(f"the file `{path}` is larger than {MAX_INLINE_BYTES:,} bytes")
        return f"data:;base64,{b64encode(file.read_bytes()).decode()}"
    except (OSError, RuntimeError) as exc:  # a loop of links is a RuntimeError
        reason = exc.strerror if isinstance(exc, OSError) else "its links form a loop"
        raise ValueError(f"the file `{path}` cannot be read: {reason}") from exc


def _replace(body: dict[str, Any], place: list[str], path: str, url: str) -> None:
    """Replace a path by a URL in the value at a place of a body."""
    container: Any = body
    *outer, last = (int(key) if key.isdigit() else key for key in place)
    for key in outer:
        container = container[key]
    container[last] = _replaced(container[last], path, url)


def _replaced(value: Any, path: str, url: str) -> Any:
    if isinstance(value, dict):
        return {name: _replaced(inner, path, url) for name, inner in value.items()}
    return url if value == path else value
