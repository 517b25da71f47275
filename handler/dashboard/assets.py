"""The page's files: our own, and those of three npm packages.

Their URLs contain a digest of all of them, so browsers may cache them for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
# In a bundle the packages' files are next to ours; in a checkout, in npm's folder.
_BUNDLED: Final = HERE / "vendor"
INSTALLED: Final = HERE.parents[2] / "infra" / "node_modules"
# By the file's name in the page: its path in node_modules.
VENDOR: Final[Mapping[str, str]] = {
    "htmx.min.js": "htmx.org/dist/htmx.min.js",
    "pico.min.css": "@picocss/pico/css/pico.min.css",
    "uPlot.iife.min.js": "uplot/dist/uPlot.iife.min.js",
    "uPlot.min.css": "uplot/dist/uPlot.min.css",
}
LICENCES: Final[Mapping[str, str]] = {
    "htmx.LICENSE": "htmx.org/LICENSE",
    "pico.LICENSE": "@picocss/pico/LICENSE.md",
    "uPlot.LICENSE": "uplot/LICENSE",
}
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@cache
def assets() -> Mapping[str, str]:
    """Return the text of each file by its name."""
    ours = {path.name: path for path in sorted((HERE / "static").iterdir())}
    theirs = {name: _BUNDLED / name for name in VENDOR}
    if not _BUNDLED.exists():
        theirs = {name: INSTALLED / path for name, path in VENDOR.items()}
    found = ours | theirs
    return {name: path.read_text(encoding="utf-8") for name, path in found.items()}


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
