"""What a model's own files say about sampling and about its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.errors import EngineError
from engine.text.text_model import SamplingDefaults, eos_ids, read_generation_config
from engine.text.tokenizer import Tokenizer
from tests.engine.scripted_model import pretrained_tokenizer

TOKENIZER = Tokenizer(pretrained_tokenizer())
END_OF_TURN = TOKENIZER.pretrained.eos_token_id


def test_a_generation_config_replaces_the_defaults_one_by_one() -> None:
    """What it leaves out or nulls, and what we do not know, changes nothing."""
    config = {"temperature": 0.6, "top_k": 20, "top_p": None, "do_sample": True}
    assert SamplingDefaults.from_generation_config(config) == SamplingDefaults(
        temperature=0.6, top_k=20
    )
    assert SamplingDefaults.from_generation_config({}) == SamplingDefaults()


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
def test_the_ends_of_a_sequence_are_gathered(
    config: dict[str, object], model_eos: object, expected: set[int]
) -> None:
    """The generation config comes before the model's; the tokenizer's end always counts."""
    assert eos_ids(config, model_eos, TOKENIZER) == expected | {END_OF_TURN}


def test_a_generation_config_is_read_from_the_models_folder(tmp_path: Path) -> None:
    """A folder without one says nothing; one that is broken is named."""
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert read_generation_config(str(tmp_path)) == {}
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"temperature": 0.6}), encoding="utf-8")
    assert read_generation_config(str(tmp_path)) == {"temperature": 0.6}
    for broken in ("{", "[]"):
        path.write_text(broken, encoding="utf-8")
        with pytest.raises(EngineError, match=r"generation_config\.json"):
            read_generation_config(str(tmp_path))
