"""History of a batch, as the API returns it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from .progress import HistoryBucket


class HistoryObject(BaseModel):
    """Rows, tokens and audio by time; periods without progress are left out."""

    object: Literal["list"] = "list"
    data: list[HistoryBucket]
