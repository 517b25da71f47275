"""Demo models: downloaded ones (`package_models`), and small ones for tests.

The small chat model runs if the other cannot be downloaded; it has memorised sums, capitals and
similar facts (docs/adr/0052).
"""

from __future__ import annotations

from pathlib import Path

NAME = "tidemill-demo"
"""Name under which either demo model is served."""

MODEL_PATH = Path(__file__).parent / "model"
"""Folder of the small chat model, in transformers' format."""

SPEECH_PATH = Path(__file__).parent / "speech"
"""Folder of a tiny Whisper for digits and a dozen words, in English and in German."""

RERANKER_PATH = Path(__file__).parent / "reranker"
"""Trained tensors of the demo reranker; `tools.demo.train_reranker` assembles its folder."""
