"""Answers in Daft; see docs/engines/daft.md."""

from __future__ import annotations

from .cli.integrations.daft import answer
from .cli.integrations.daft_provider import Provider

__all__ = ["Provider", "answer"]
