"""Escalated line: a request as the second model of a cascade gets it."""

from __future__ import annotations

from pydantic_core import from_json, to_json

from ..escalation import EscalateBy
from .lines import BOM, RawLine


def escalated_line(raw: RawLine, by: EscalateBy, model: str | None = None) -> RawLine:
    """Return a line with the second model's name, if it has one, and its way to decide.

    The digest, and so the ID of its row, differs from that of the original line.
    """
    line = from_json(raw.data.removeprefix(BOM))
    body = line["body"]
    if model is not None:
        body["model"] = model
    if by == "chat":
        body["decide_by"] = by
        body.pop("debias", None)  # a chat shows the options once
    return RawLine(raw.number, to_json(line, inf_nan_mode="constants"))
