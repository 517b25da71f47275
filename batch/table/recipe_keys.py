"""Keys of a recipe, by subject."""

from __future__ import annotations

from typing import Final

from tidemill.protocol.fetched_urls import FILE_URL
from tidemill.protocol.requests import PROMPT_FIELDS

CALIBRATION: Final = ("calibrate", "prior", "gold", "calibration")
"""Keys that calibrate answers."""

RECIPE_KEYS: Final = (
    *("url", "prompt", "system", "id", "keep", "params", "output", "vectors", "confidence"),
    *("ask", "questions", "labels", "question_layout", "permutations"),
    *CALIBRATION,
    *("escalate", "escalate_below", "target_accuracy", "escalate_by", "priority"),
    *(name for name in PROMPT_FIELDS if name != "prompt"),
    FILE_URL,
)
"""Keys of a recipe: its own, and the body fields with templates."""

TEMPLATES: Final = ("prompt", "messages", "input", FILE_URL)
QUESTIONS: Final = ("ask", "questions", "labels")
"""Keys that are replaced together when flags override a file."""

CASCADE: Final = ("escalate", "escalate_below", "target_accuracy", "escalate_by")
"""Keys of a cascade."""
