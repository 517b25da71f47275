"""One context of trusted authorities for all HTTP clients of a test process.

Each new client of httpx reads them all: 18 ms of CPU time, more than most tests of a command take.
"""

from __future__ import annotations

import os
import ssl
from functools import cache
from typing import Any

import httpx
from httpx._transports import default


def share_authorities() -> None:
    """Let clients with the default authorities share their context; others create their own."""

    def create(verify: Any = True, cert: Any = None, **options: Any) -> ssl.SSLContext:  # noqa: FBT002 - httpx's
        if verify is not True or cert or not options.get("trust_env", True):
            return httpx.create_ssl_context(verify=verify, cert=cert, **options)
        return _default_context(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))

    default.create_ssl_context = create  # type: ignore[attr-defined]


@cache
def _default_context(_file: str | None, _folder: str | None) -> ssl.SSLContext:
    """Return the context that httpx creates for these variables."""
    return httpx.create_ssl_context()
