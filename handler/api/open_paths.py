"""Paths that need no key. The gateway has the same list: infra/api/http_api.py."""

from __future__ import annotations

from typing import Final

HEALTH: Final = "/health"
DOCUMENT: Final = "/openapi.json"
# A path that ends with a slash includes everything below it.
PUBLIC: Final = ("/", HEALTH, DOCUMENT, "/dashboard", "/dashboard/assets/")


def is_open(path: str) -> bool:
    """Return whether a path needs no key."""
    return path in PUBLIC or path.startswith(
        tuple(name for name in PUBLIC if name != "/" and name.endswith("/"))
    )
