"""Answers in Daft; see docs/engines/daft.md."""

from __future__ import annotations

from .sdk.integrations.daft import answer
from .sdk.integrations.daft_provider import Provider

__all__ = ["Provider", "answer"]
