"""The model's own files define sampling defaults and end tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.scripted_model import pretrained_tokenizer
from tidemill.engine.text.text_model import (
    GenerationConfig,
    SamplingDefaults,
    eos_ids,
    read_generation_config,
)
from tidemill.engine.text.tokenizer import Tokenizer
from tidemill.engine.text.vocabulary import vocabulary_of
from tidemill.protocol.contract import EngineError

TOKENIZER = Tokenizer(vocabulary_of(pretrained_tokenizer()))
END_OF_TURN = TOKENIZER.vocabulary.eos_id


def config_in(folder: Path, text: str | bytes) -> GenerationConfig:
    """Return the config read from a folder with this generation config."""
    data = text.encode() if isinstance(text, str) else text
    (folder / "generation_config.json").write_bytes(data)
    return read_generation_config(str(folder))


def test_a_generation_config_replaces_the_defaults_one_by_one(tmp_path: Path) -> None:
    """Missing, null and unknown keys change nothing."""
    config = {"temperature": 0.6, "top_k": 20, "top_p": None, "do_sample": True}
    assert config_in(tmp_path, json.dumps(config)).defaults == SamplingDefaults(
        temperature=0.6, top_k=20
    )
    assert config_in(tmp_path, "{}").defaults == SamplingDefaults()


@pytest.mark.parametrize(
    ("config", "model_eos", "expected"),
    [
        ({"eos_token_id": 5}, 9, {5}),
        ({"eos_token_id": [5, 6]}, None, {5, 6}),
        ({}, [7, 8], {7, 8}),
        ({"eos_token_id": None}, 7, {7}),
        ({}, None, set()),
    ],
)
def test_the_end_tokens_are_collected(
    config: dict[str, Any], model_eos: object, expected: set[int]
) -> None:
    """The generation config has priority over the model's; the tokenizer's end always counts."""
    generation = GenerationConfig(**config)
    assert eos_ids("m", generation, model_eos, TOKENIZER) == expected | {END_OF_TURN}


@pytest.mark.parametrize("model_eos", ["x", 1.5, -1, [1, "x"], True])
def test_an_invalid_end_token_is_refused(model_eos: object) -> None:
    """The error names the file."""
    with pytest.raises(EngineError, match=r"m: config\.json: `eos_token_id` "):
        eos_ids("m", GenerationConfig(), model_eos, TOKENIZER)


def test_a_folder_without_a_generation_config_has_defaults(tmp_path: Path) -> None:
    """Base models have none."""
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert read_generation_config(str(tmp_path)) == GenerationConfig()


@pytest.mark.parametrize("text", ["{", "[]", "null", "3", "", b"\xff\xfe{}", "[" * 100_000])
def test_a_generation_config_that_is_not_an_object_is_named(
    tmp_path: Path, text: str | bytes
) -> None:
    """The error contains the file's name."""
    with pytest.raises(EngineError, match=r"generation_config\.json"):
        config_in(tmp_path, text)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "NaN"),
        ("temperature", "-0.5"),
        ("temperature", '"0.6"'),
        ("temperature", "1e999"),
        ("top_p", "Infinity"),
        ("top_p", "1.5"),
        ("top_p", "[0.9]"),
        ("top_k", "-2"),
        ("top_k", "2.5"),
        ("top_k", "true"),
        ("min_p", "{}"),
        ("min_p", "-1"),
        ("repetition_penalty", "0"),
        ("repetition_penalty", "NaN"),
        ("repetition_penalty", "-1.1"),
        ("eos_token_id", '"796"'),
        ("eos_token_id", "[796, -1]"),
    ],
)
def test_a_generation_config_is_validated_like_a_request(
    tmp_path: Path, key: str, value: str
) -> None:
    """Each row would otherwise be garbage or fail; one sentence names the file and the key."""
    with pytest.raises(
        EngineError, match=rf"generation_config\.json: `{key}.* must .*got "
    ) as caught:
        config_in(tmp_path, f'{{"{key}": {value}}}')
    assert "\n" not in str(caught.value)
