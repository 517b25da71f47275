"""A line that every engine can run: one that dies of it is on a machine that is broken."""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import Collection
from typing import Any, Final

from pydantic_core import to_json

_RATE: Final = 16_000
_TEXT: Final = "The tide comes in."


def known_line(endpoints: Collection[str]) -> bytes | None:
    """Return such a line for a model that serves these; None where there is none for them."""
    for url, body in _bodies().items():
        if url in endpoints:
            line = {"custom_id": "known", "method": "POST", "url": url, "body": body}
            return to_json(line) + b"\n"
    return None


def _bodies() -> dict[str, dict[str, Any]]:
    return {
        "/v1/completions": {"prompt": _TEXT, "max_tokens": 8, "temperature": 0},
        "/v1/embeddings": {"input": _TEXT},
        "/v1/score": {"text_1": _TEXT, "text_2": _TEXT},
        "/v1/audio/transcriptions": {"file_url": f"data:audio/wav;base64,{_second_of_silence()}"},
    }


def _second_of_silence() -> str:
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(_RATE)
        sound.writeframes(bytes(2 * _RATE))
    return base64.b64encode(file.getvalue()).decode()
