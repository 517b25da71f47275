"""The base of a configuration's tables."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Table(BaseModel):
    """A table of the file: every key is known, and of its type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
