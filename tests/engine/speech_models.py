"""Tiny random models of the Whisper family, recordings for them, and work over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tidemill.engine.config import EngineConfig
from tidemill.engine.loop.recording import Recording
from tidemill.engine.loop.speech import SpeechCore
from tidemill.engine.media.audio_features import FeatureExtractor
from tidemill.engine.model.speech.loading import LoadedSpeech, load_speech
from tidemill.engine.model.speech.runner import SpeechRunner
from tidemill.engine.scheduling.speech import SpeechRequest

RATE = 16_000
# Ids below are of text; behind come the end, the start, languages and what else steers.
END = 300
CODES = ("en", "de", "fr", "es")
# Name → mels, seconds of a window, whether there are languages, and the text's most tokens.
SHAPES = {
    "English alone": (80, 4, False, 24),
    "many languages": (80, 3, True, 24),
    "128 bands, as large-v3": (128, 2, True, 24),
}
# So wide that the likeliest tokens differ by far more than rounding.
SPREAD = 0.3


def build(shape: str, seed: int = 0) -> Any:
    """Return transformers' model of a shape, with random weights."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    mels, seconds, has_languages, targets = SHAPES[shape]
    start = END + 1
    first_language = start + 1
    task = first_language + (len(CODES) if has_languages else 0)
    before, no_times = task + 3, task + 5
    torch.manual_seed(seed)
    config = WhisperConfig(
        d_model=64,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=2,
        encoder_ffn_dim=96,
        decoder_ffn_dim=128,
        max_source_positions=50 * seconds,
        max_target_positions=targets,
        vocab_size=no_times + 2 + 50 * seconds,
        num_mel_bins=mels,
        pad_token_id=END,
        bos_token_id=END,
        eos_token_id=END,
        decoder_start_token_id=start,
        init_std=SPREAD,
    )
    model = WhisperForConditionalGeneration(config).eval()
    settings = model.generation_config
    settings.eos_token_id = settings.pad_token_id = END
    settings.decoder_start_token_id, settings.no_timestamps_token_id = start, no_times
    settings.prev_sot_token_id = before
    settings.suppress_tokens = [1, 2, 7, start, *range(first_language, no_times)]
    settings.begin_suppress_tokens = [3, END]
    settings.max_initial_timestamp_index = 50
    settings.max_length = targets
    settings.alignment_heads = [[1, 0], [2, 0], [2, 1]]
    settings.is_multilingual = has_languages
    if has_languages:
        settings.lang_to_id = {f"<|{code}|>": first_language + i for i, code in enumerate(CODES)}
        settings.task_to_id = {"transcribe": task, "translate": task + 1}
    else:
        settings.forced_decoder_ids = [[1, no_times]]
    return model


def extractor_of(shape: str) -> Any:
    """Return transformers' feature extractor of a shape."""
    from transformers import WhisperFeatureExtractor

    mels, seconds, *_ = SHAPES[shape]
    return WhisperFeatureExtractor(feature_size=mels, chunk_length=seconds)


def save(folder: Path, shape: str, seed: int = 0) -> Any:
    """Write a model and its preprocessor to a folder and return the model."""
    model = build(shape, seed)
    model.save_pretrained(folder)
    extractor_of(shape).save_pretrained(folder)
    return model


def clip(seconds: float, seed: int) -> NDArray[np.float32]:
    """Return a recording of noise whose volume rises and falls."""
    count = int(seconds * RATE)
    noise = np.random.default_rng(seed).standard_normal(count) * 0.1
    samples: NDArray[np.float32] = (noise * np.sin(np.arange(count) / (2_000 + 700 * seed))).astype(
        np.float32
    )
    return samples


def work_of(
    folder: Path, num_slots: int = 3, dtype: Any = "float32", steps_ahead: int = 0
) -> SpeechCore:
    """Return work over the model in a folder."""
    loaded = load_speech(EngineConfig(str(folder), device="cpu", dtype=dtype))
    return work_over(loaded, num_slots, steps_ahead)


def work_over(loaded: LoadedSpeech, num_slots: int = 3, steps_ahead: int = 0) -> SpeechCore:
    """Return work over a loaded model."""
    runner = SpeechRunner(loaded.network, loaded.backend, num_slots)
    description, extractor = loaded.description, FeatureExtractor(loaded.description.features)
    return SpeechCore(
        runner, description.whisper_tokens, extractor, num_slots, steps_ahead=steps_ahead
    )


def run(work: SpeechCore, *requests: SpeechRequest) -> list[Recording]:
    """Run requests together to their ends, and return them."""
    recordings = [work.add(request) for request in requests]
    while work.step() is not None:
        pass
    return recordings
