"""The fields of a speech model's files, and refusals by their values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.speech_models import CODES, END, SHAPES, build, save
from tidemill.engine.config import EngineConfig
from tidemill.engine.errors import ModelRefused
from tidemill.engine.inspection import ENGLISH_ONLY, inspect_model
from tidemill.engine.model.speech.whisper_config import read_speech


def edit(folder: Path, file: str, **fields: Any) -> None:
    """Change fields of a file in a folder."""
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_multilingual_model_has_its_features(tmp_path: Path) -> None:
    """The config contains its languages, its windows and its prompt's tokens."""
    save(tmp_path, "many languages")
    hearing = read_speech(str(tmp_path)).hearing
    assert set(hearing.languages) == set(CODES)
    assert hearing.tasks == ("transcribe", "translate")
    assert (hearing.sampling_rate, hearing.window_seconds) == (16_000, 3.0)
    assert hearing.max_prompt_tokens == 24 // 2 - 1
    assert hearing.has_timestamps
    assert hearing.has_word_times


def test_a_model_of_english_has_no_languages(tmp_path: Path) -> None:
    """Its prompt contains the tokens that its file forces."""
    model = save(tmp_path, "English alone")
    hf_config = read_speech(str(tmp_path))
    assert hf_config.hearing.languages == ()
    assert hf_config.hearing.tasks == ("transcribe",)
    assert hf_config.whisper_tokens.forced == (model.generation_config.no_timestamps_token_id,)
    plan = inspect_model(EngineConfig(str(tmp_path), device="cpu")).plan
    assert plan is not None
    assert plan.notes == (ENGLISH_ONLY,)


def test_is_multilingual_false_overrides_the_tables_of_languages_and_tasks(tmp_path: Path) -> None:
    """Fine-tuned English-only models copy the tables of others."""
    save(tmp_path, "many languages")
    edit(tmp_path, "generation_config.json", is_multilingual=False)
    hearing = read_speech(str(tmp_path)).hearing
    assert (hearing.languages, hearing.tasks) == ((), ("transcribe",))


def test_without_a_generation_config_the_config_is_used(tmp_path: Path) -> None:
    """It contains no timestamps, so neither word timestamps nor long recordings are supported."""
    model = save(tmp_path, "English alone")
    (tmp_path / "generation_config.json").unlink()
    hf_config = read_speech(str(tmp_path))
    assert hf_config.whisper_tokens.end == END
    assert hf_config.whisper_tokens.start == model.config.decoder_start_token_id
    assert not hf_config.hearing.has_timestamps
    assert not hf_config.hearing.has_word_times


def test_without_alignment_heads_the_upper_half_looks(tmp_path: Path) -> None:
    """openai-whisper has the same default."""
    save(tmp_path, "English alone")
    edit(tmp_path, "generation_config.json", alignment_heads=None)
    assert read_speech(str(tmp_path)).whisper_tokens.alignment_heads == (
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    )


def test_a_processor_of_transformers_5_is_read_too(tmp_path: Path) -> None:
    """It keeps the same settings in a separate file."""
    save(tmp_path, "many languages")
    fields = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text(json.dumps({"feature_extractor": fields}))
    assert read_speech(str(tmp_path)).features.window_frames == 300


@pytest.mark.parametrize(
    ("file", "fields", "words"),
    [
        ("config.json", {"model_type": "moonshine"}, "only Whisper's family"),
        ("config.json", {"quantization_config": {"bits": 4}}, "quantised"),
        ("config.json", {"activation_function": "relu"}, "activation_function"),
        ("config.json", {"encoder_attention_heads": 7}, "encoder_attention_heads"),
        ("config.json", {"decoder_layers": 10**6}, "decoder_layers"),
        ("config.json", {"vocab_size": 10}, "outside its vocabulary"),
        ("config.json", {"max_source_positions": 7}, "belongs to another model"),
        ("generation_config.json", {"eos_token_id": "x"}, "eos_token_id"),
        ("generation_config.json", {"lang_to_id": [1]}, "lang_to_id"),
        ("generation_config.json", {"alignment_heads": [[9, 9]]}, "alignment_heads"),
        ("generation_config.json", {"alignment_heads": 3}, "alignment_heads"),
        ("generation_config.json", {"forced_decoder_ids": [[1, -4]]}, "forced_decoder_ids"),
        ("generation_config.json", {"max_length": -5}, "max_length"),
        ("generation_config.json", {"max_initial_timestamp_index": -5}, "max_initial_timestamp"),
        ("generation_config.json", {"no_timestamps_token_id": 0}, "201 times"),
        ("generation_config.json", {"no_timestamps_token_id": 308}, "belongs to another model"),
        ("preprocessor_config.json", {"feature_size": 128}, "belongs to another model"),
        ("preprocessor_config.json", {"n_fft": 159}, "n_fft 159"),
        ("preprocessor_config.json", {"n_fft": 10**9}, "n_fft 1000000000"),
    ],
)
def test_values_that_no_model_of_the_family_has_are_refused(
    tmp_path: Path, file: str, fields: dict[str, Any], words: str
) -> None:
    """The error contains the name of the file or the field."""
    save(tmp_path, "English alone")
    edit(tmp_path, file, **fields)
    with pytest.raises(ModelRefused, match=words):
        read_speech(str(tmp_path))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_follows_from_the_config(tmp_path: Path, shape: str) -> None:
    """The shapes are those of mels, window and text."""
    mels, seconds, _, targets = SHAPES[shape]
    save(tmp_path, shape)
    architecture = read_speech(str(tmp_path)).architecture
    assert architecture.num_mels == mels
    assert architecture.window_frames == 100 * seconds
    assert architecture.max_target_positions == targets
    assert architecture.vocab_size == build(shape).config.vocab_size
