"""Answers in Spark; see docs/integrations/spark.md."""

from __future__ import annotations

from .sdk.integrations.spark import answer, decide

__all__ = ["answer", "decide"]
