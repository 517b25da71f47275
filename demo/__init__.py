"""Demo models: those that are downloaded (`package_models`), and small ones for tests.

The small chat model runs where the other cannot be downloaded; it knows sums, capitals, and the
like by heart (docs/adr/0052).
"""

from __future__ import annotations

from pathlib import Path

NAME = "tidemill-demo"
"""The name that either demo model is served under."""

MODEL_PATH = Path(__file__).parent / "model"
"""The folder of the small chat model, in transformers' format."""

SPEECH_PATH = Path(__file__).parent / "speech"
"""The folder of a tiny Whisper that knows digits and a dozen words, in English and in German."""

RERANKER_PATH = Path(__file__).parent / "reranker"
"""The trained tensors of the demo reranker; `tools.demo.train_reranker` assembles its folder."""
