"""The speech model in the engine generates the same tokens as transformers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.demo.spoken import (
    Recording,
    any_voice,
    any_words,
    held_out,
    load_speech_model,
    speak,
)
from tests.engine.speech_models import run, work_of
from tidemill.demo import SPEECH_PATH
from tidemill.engine.scheduling.speech import SpeechRequest
from tools.demo.voices import SAMPLE_RATE

Samples = NDArray[np.float32]


def long_recordings() -> list[Recording]:
    """Return recordings of several windows: with and without pauses, in both languages."""
    rng = random.Random(4)
    breathless = speak([any_words(rng, 45)], [0.2, 0.5], "en", any_voice(rng, "en"))
    return [*held_out(4, "en", phrases=5), *held_out(2, "de", phrases=6), breathless]


def reference_tokens(loaded: tuple[Any, Any], samples: Samples, **options: Any) -> list[list[int]]:
    """Return the text tokens of each segment that transformers generates for one recording."""
    model, processor = loaded
    window = processor.feature_extractor.n_samples
    rest = {"truncation": False, "padding": "longest"} if len(samples) > window else {}
    inputs = processor(
        samples,
        sampling_rate=SAMPLE_RATE,
        return_tensors="pt",
        return_attention_mask=True,
        **rest,
    )
    output = model.generate(**inputs, return_timestamps=True, return_segments=True, **options)
    end = model.generation_config.eos_token_id
    texts = [[t for t in one["tokens"].tolist() if t < end] for one in output["segments"][0]]
    return [text for text in texts if text]


def test_every_token_matches_transformers() -> None:
    """Short and long recordings run together: segments, languages and translations match."""
    torch.set_num_threads(1)
    loaded = load_speech_model()
    short = [*held_out(4, "en"), *held_out(4, "de"), *held_out(4, "en", digits=False)]
    for options in ({}, {"language": "de", "task": "translate"}):
        recordings = [*long_recordings(), *short]
        requests = [
            SpeechRequest(one.samples, wants_segments=True, **options) for one in recordings
        ]
        transcribed = run(work_of(SPEECH_PATH), *requests)
        for one, recording in zip(recordings, transcribed, strict=True):
            got = [list(segment.token_ids) for segment in recording.result().segments]
            assert got == reference_tokens(
                loaded, one.samples, **({"task": "transcribe"} | options)
            )
            if not options:
                assert recording.result().language == one.language
