"""The page's files; their URLs contain a digest of all of them, so that browsers may cache them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@cache
def assets() -> Mapping[str, str]:
    """Return the text of each file by its name."""
    paths = sorted((HERE / "static").iterdir())
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


@cache
def version() -> str:
    """Return the digest of all files."""
    digest = sha256()
    for name, text in assets().items():
        digest.update(f"{name}\0{text}\0".encode())
    return digest.hexdigest()[:16]


def url_of(name: str) -> str:
    """Return the URL of a file of the page; raises KeyError for an unknown name."""
    assets()[name]
    return f"/dashboard/assets/{version()}/{name}"


def type_of(name: str) -> str:
    """Return the content type of a file."""
    return _TYPES[Path(name).suffix]
