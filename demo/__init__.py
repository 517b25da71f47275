"""The demo model: a tiny trained chat model, the text it was trained on and the recipe."""

from __future__ import annotations

from pathlib import Path

NAME = "tidemill-demo"
"""The name under which the demo model is served."""

MODEL_PATH = Path(__file__).parent / "model"
"""The folder of the demo model, in transformers' format."""

SPEECH_PATH = Path(__file__).parent / "speech"
"""The folder of a tiny Whisper that knows digits and a dozen words, in English and in German."""

RERANKER_PATH = Path(__file__).parent / "reranker"
"""The trained tensors of the demo reranker; `tidemill.demo.train_reranker` assembles its folder."""
