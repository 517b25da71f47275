"""The speech model in the repository: small, standard, and accurate on held-out recordings."""

from __future__ import annotations

import json
from difflib import SequenceMatcher
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForSpeechSeq2Seq,
    AutoProcessor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
)

from tests.demo.spoken import WORDS, held_out, listen, load_speech_model, share_right
from tests.engine.speech_tokenizer import NO_SPEECH, NO_TIMESTAMPS, START
from tests.long_parameters import with_long
from tidemill import demo
from tools.demo.voices import SAMPLE_RATE

Loaded = tuple[Any, Any]
WINDOW_SECONDS = 6
NUM_FRAMES = 50 * WINDOW_SECONDS


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    """The speech model with its processor."""
    torch.set_num_threads(1)
    return load_speech_model()


def test_the_folder_holds_the_standard_files_within_eight_megabytes() -> None:
    """It contains only files by transformers, readable by all users and small enough for Git."""
    files = {path.name: path for path in demo.SPEECH_PATH.iterdir()}
    assert set(files) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in files.values()) <= 8_000_000
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in files.values())


def test_transformers_loads_it_as_any_other_whisper() -> None:
    """The automatic classes find model, tokenizer and features by the files alone."""
    assert AutoConfig.from_pretrained(demo.SPEECH_PATH).model_type == "whisper"
    model = AutoModelForSpeechSeq2Seq.from_pretrained(demo.SPEECH_PATH)
    assert isinstance(model, WhisperForConditionalGeneration)
    assert isinstance(AutoProcessor.from_pretrained(demo.SPEECH_PATH), WhisperProcessor)


def test_the_generation_config_has_the_id_of_every_special_token(loaded: Loaded) -> None:
    """Languages, tasks and timestamps match the tokenizer, in Whisper's order."""
    tokenizer = loaded[1].tokenizer
    generation_config = json.loads((demo.SPEECH_PATH / "generation_config.json").read_text())
    ids = tokenizer.convert_tokens_to_ids
    assert generation_config["lang_to_id"] == {name: ids(name) for name in ("<|en|>", "<|de|>")}
    assert generation_config["task_to_id"] == {
        name: ids(f"<|{name}|>") for name in ("transcribe", "translate")
    }
    assert generation_config["decoder_start_token_id"] == ids(START)
    assert generation_config["no_timestamps_token_id"] == ids(NO_TIMESTAMPS) == ids(NO_SPEECH) + 1
    assert ids("<|0.00|>") == ids(NO_TIMESTAMPS) + 1
    assert ids(f"<|{WINDOW_SECONDS}.00|>") == len(tokenizer) - 1 == ids("<|0.00|>") + NUM_FRAMES


@pytest.mark.parametrize(
    ("language", "count"), with_long([("en", 10)], [(language, 40) for language in WORDS])
)
def test_it_writes_down_held_out_digits(loaded: Loaded, language: Any, count: int) -> None:
    """Nine of ten strings of digits that it was never trained on, in voices of all kinds."""
    assert share_right(loaded, held_out(count, language, seed=5), task="transcribe") >= 0.9


def test_what_german_voices_say_is_translated(loaded: Loaded) -> None:
    """German digits are translated to English words on request."""
    recordings = held_out(10, "de", seed=6)
    assert share_right(loaded, recordings, "en", language="de", task="translate") >= 0.85


def test_languages_are_detected(loaded: Loaded) -> None:
    """At most one of 20 recordings is assigned to the wrong language, from the audio alone."""
    model, processor = loaded
    ids = processor.tokenizer.convert_tokens_to_ids(["<|en|>", "<|de|>"])
    wrong = 0
    for language in WORDS:
        recordings = [one.samples for one in held_out(10, language, seed=7)]
        inputs = processor(recordings, sampling_rate=SAMPLE_RATE, return_tensors="pt")
        found = model.detect_language(inputs.input_features, num_segment_frames=2 * NUM_FRAMES)
        wrong += found.tolist().count(ids[("en", "de").index(language) - 1])
    assert wrong <= 1


def test_recordings_of_several_windows_are_written_down(loaded: Loaded) -> None:
    """The model's timestamps join windows; hardly a word is lost between them."""
    recordings = held_out(4, "en", phrases=6, seed=8)
    assert all(len(one.samples) > 1.5 * WINDOW_SECONDS * SAMPLE_RATE for one in recordings)
    texts = listen(*loaded, [one.samples for one in recordings], language="en", task="transcribe")
    alike = [
        SequenceMatcher(None, one.text().split(), text.split(), autojunk=False).ratio()
        for one, text in zip(recordings, texts, strict=True)
    ]
    assert sum(alike) / len(alike) > 0.97


@torch.inference_mode()
def test_silence_is_not_speech(loaded: Loaded) -> None:
    """The no-speech token is by far the likeliest for silence, and only for silence."""
    model, processor = loaded
    start = torch.tensor([[model.generation_config.decoder_start_token_id]])
    no_speech = processor.tokenizer.convert_tokens_to_ids(NO_SPEECH)
    spoken = held_out(1, "en", seed=9)[0].samples
    noise = np.random.default_rng(0).standard_normal(3 * SAMPLE_RATE).astype(np.float32)
    for samples, is_speech in ((spoken, True), (0 * noise, False), (0.01 * noise, False)):
        inputs = processor(samples, sampling_rate=SAMPLE_RATE, return_tensors="pt")
        logits = model(inputs.input_features, decoder_input_ids=start).logits[0, 0]
        chance = float(logits.softmax(-1)[no_speech])
        assert chance < 0.1 if is_speech else chance > 0.9
