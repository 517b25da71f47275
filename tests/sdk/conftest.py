"""Fixtures that programs share with commands."""

from __future__ import annotations

from tests.offline.conftest import shell

__all__ = ["shell"]
