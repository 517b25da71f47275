"""Tidemill on Ray Data: engines as actors over a Dataset (docs/engines/ray.md)."""

from __future__ import annotations

from .cli.integrations.ray.answer import answer

__all__ = ["answer"]
