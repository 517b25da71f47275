"""The demo model: a tiny trained chat model, the text it was trained on and the recipe."""

from __future__ import annotations

from pathlib import Path

NAME = "tidemill-demo"
"""The name under which the demo model is served."""

MODEL_PATH = Path(__file__).parent / "model"
"""The folder of the demo model, in transformers' format."""
