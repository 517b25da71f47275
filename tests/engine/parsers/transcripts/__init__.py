"""Transcripts of models' answers in each format, with the messages that they mean.

A file has the names of its parsers, and answers to requests with `TOOLS`. `calls` are names and
arguments.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
FORMATS = sorted(path.stem for path in FOLDER.glob("*.toml"))

_STRING = {"type": "string"}
TOOLS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {"city": _STRING, "days": {"type": "integer"}},
    },
    "now": {"type": "object", "properties": {}},
    "note": {"type": "object", "properties": {"text": _STRING}},
    "plan": {
        "type": "object",
        "properties": {
            "trip": {"type": "object"},
            "tags": {"type": "array", "items": _STRING},
        },
    },
}


@dataclass(frozen=True)
class Transcript:
    """An answer, its format, and its parts; the arguments of `calls` are JSON texts."""

    format: str
    case: str
    tool_call_parser: str
    reasoning_parser: str
    text: str
    reasoning: str
    content: str
    calls: list[tuple[str, str]]

    def __str__(self) -> str:
        """Return the format and the case."""
        return f"{self.format}: {self.case}"


def load_transcripts(name: str) -> list[Transcript]:
    """Return the transcripts of a file."""
    data = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    return [
        Transcript(
            name,
            each["case"],
            data["tool_call_parser"],
            data["reasoning_parser"],
            each["text"],
            each.get("reasoning", ""),
            each.get("content", ""),
            [(function, arguments) for function, arguments in each.get("calls", ())],
        )
        for each in data["transcript"]
    ]
