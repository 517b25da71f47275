"""What needs no key. The gateway lets the same in: infra/api/http_api.py."""

from __future__ import annotations

from typing import Final

HEALTH: Final = "/health"
DOCUMENT: Final = "/openapi.json"
# A name that ends with a slash stands for all that lies under it.
PUBLIC: Final = ("/", HEALTH, DOCUMENT, "/dashboard", "/dashboard/assets/")


def is_public(path: str) -> bool:
    """Say whether a path needs no key."""
    return path in PUBLIC or path.startswith(
        tuple(name for name in PUBLIC if name != "/" and name.endswith("/"))
    )
