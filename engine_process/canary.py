"""Canary: a known request that checks a machine before it runs users' requests.

A machine is faulty if its engine dies on the canary, fails it, or answers it differently from the
first engine of the same worker.
"""

from __future__ import annotations

import base64
import io
import math
import wave
from collections.abc import Collection, Sequence
from typing import Any, Final

from pydantic_core import from_json, to_json

from .frames import Row

_RATE: Final = 16_000
_TEXT: Final = "The tide comes in."
# Engines may sum in a different order; the numbers of a faulty machine are far off.
_MOST_DISTANCE: Final = 0.1


# A text; rows of numbers, one or one for each token; or a sparse vector, its values by index.
_Outcome = str | list[list[float]] | dict[int, float]


class Canary:
    """A known request, and the outcome of its first run."""

    def __init__(self, line: bytes) -> None:
        self.line = line
        self._outcome: _Outcome | None = None

    def find_fault(self, row: Row) -> str | None:
        """Return the fault of the machine that the canary's row shows, or None.

        The first good outcome is stored for comparison. A row that rejects the request shows no
        fault.
        """
        response = from_json(row.row)["response"]
        if not row.is_success:
            status = response["status_code"]
            return f"the canary request failed with status {status}" if status >= 500 else None
        outcome = _outcome_of(response["body"])
        if self._outcome is None:
            self._outcome = outcome
        elif not _are_alike(self._outcome, outcome):
            return "the canary request had another result than before"
        return None


def canary_line(endpoints: Collection[str]) -> bytes | None:
    """Return a canary line for one of these endpoints; None if none of them has one."""
    for url, body in _bodies().items():
        if url in endpoints:
            line = {"custom_id": "known", "method": "POST", "url": url, "body": body}
            return to_json(line) + b"\n"
    return None


def _bodies() -> dict[str, dict[str, Any]]:
    return {
        "/v1/completions": {"prompt": _TEXT, "max_tokens": 8, "temperature": 0},
        "/v1/embeddings": {"input": _TEXT},
        # MaxSim of a text with itself is the same whatever a model computes.
        "/v1/score": {"text_1": _TEXT, "text_2": "A mill grinds the grain."},
        "/pooling": {"input": _TEXT},
        "/v1/audio/transcriptions": {"file_url": f"data:audio/wav;base64,{_second_of_silence()}"},
    }


def _outcome_of(body: dict[str, Any]) -> _Outcome | None:
    """Return the outcome of a canary line: its text, or its numbers."""
    if body.get("choices"):
        return str(body["choices"][0].get("text"))
    if body.get("data"):
        first = body["data"][0]
        if "data" in first and all(isinstance(pair, dict) for pair in first["data"]):
            return {pair["index"]: pair["value"] for pair in first["data"]}
        values: list[Any] = first.get("embedding") or first.get("data") or [first["score"]]
        return values if isinstance(values[0], list) else [values]
    return body.get("text")


def _are_alike(before: _Outcome, now: _Outcome | None) -> bool:
    """Return whether two outcomes agree up to rounding: in the first word, or in each row."""
    if isinstance(before, dict) and isinstance(now, dict):
        indexes = [*(before | now)]
        return _are_near(*([found.get(index, 0.0) for index in indexes] for found in (before, now)))
    if not (isinstance(before, list) and isinstance(now, list)):
        return isinstance(before, str) and isinstance(now, str) and _word(before) == _word(now)
    return len(before) == len(now) and all(map(_are_near, before, now))


def _are_near(before: Sequence[float], now: Sequence[float]) -> bool:
    most = _MOST_DISTANCE * math.hypot(*before, 1e-6)
    return len(before) == len(now) and math.dist(before, now) <= most


def _word(text: str) -> list[str]:
    return text.split()[:1]


def _second_of_silence() -> str:
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(_RATE)
        sound.writeframes(bytes(2 * _RATE))
    return base64.b64encode(file.getvalue()).decode()
