"""Refused encoders with their messages, and cached parity checks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.model.encoders.small_encoders import loaded, save
from tidemill.engine.errors import ModelRefused
from tidemill.engine.model.encoders import loading


def changed(folder: Path, **changes: Any) -> Path:
    """Change fields of a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **changes}))
    return folder


def weights(folder: Path, **changes: torch.Tensor | None) -> Path:
    """Change tensors of a folder; None removes one."""
    path = folder / "model.safetensors"
    stored = {**load_file(path), **{key.replace("__", "."): v for key, v in changes.items()}}
    save_file({key: v for key, v in stored.items() if v is not None}, path)
    return folder


def test_weights_that_lack_a_tensor_are_refused(tmp_path: Path) -> None:
    """The error names it; random numbers never replace it."""
    save(tmp_path, "Bert")
    name = "encoder.layer.1.output.dense.weight"
    weights(tmp_path, **{name.replace(".", "__"): None})
    with pytest.raises(ModelRefused, match=r"weights lack bert\.encoder\.layer\.1\.output\.dense"):
        loaded(tmp_path)


def test_weights_of_more_than_the_network_are_refused(tmp_path: Path) -> None:
    """Without them its answers would be wrong."""
    save(tmp_path, "Bert")
    weights(tmp_path, encoder__layer__0__output__adapter__weight=torch.ones(4, 4))
    with pytest.raises(ModelRefused, match=r"adapter\.weight, which BertModel does not use"):
        loaded(tmp_path)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    """Damaged weights produce answers that are not finite."""
    save(tmp_path, "Bert")
    weights(tmp_path, embeddings__LayerNorm__bias=torch.full((48,), torch.nan))
    with pytest.raises(ModelRefused, match=r"NaN or infinity|relative distance"):
        loaded(tmp_path)


def test_quantised_weights_and_adapters_are_refused(tmp_path: Path) -> None:
    """The messages are the same as for decoders."""
    save(tmp_path / "quantised", "Bert")
    changed(tmp_path / "quantised", quantization_config={"bits": 4})
    with pytest.raises(ModelRefused, match="quantised"):
        loaded(tmp_path / "quantised")
    save(tmp_path / "adapter", "Bert")
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelRefused, match="pass its base model with --model"):
        loaded(tmp_path / "adapter")


def test_an_older_name_of_a_norm_is_known(tmp_path: Path) -> None:
    """Checkpoints that were made of TensorFlow's call weight and bias gamma and beta."""
    save(tmp_path, "Bert")
    path = tmp_path / "model.safetensors"
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    stored = load_file(path)
    for new, name in old.items():
        stored = {key.replace(new, name): value for key, value in stored.items()}
    save_file(stored, path)
    assert loaded(tmp_path).notes == ()


def test_an_encoder_decoder_is_refused_by_name(tmp_path: Path) -> None:
    """Neither of its halves is a vector."""
    save(tmp_path, "Bert")
    config = {"model_type": "bart", "architectures": ["BartModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelRefused, match="'bart' is an encoder-decoder"):
        loaded(tmp_path)


def test_a_model_that_fails_the_check_is_run_by_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A different activation is a different function."""
    save(tmp_path, "Bert", hidden_act="gelu_new")
    families = loading.architecture_of

    def wrong(*given: Any) -> Any:
        return replace(families(*given), activation="silu")

    monkeypatch.setattr(loading, "architecture_of", wrong)
    (note,) = loaded(tmp_path).notes
    assert "transformers runs this model" in note
    assert "its vectors differ from transformers'" in note


def test_a_proof_that_went_well_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files and the source code must be the same."""
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path / "cache"))
    save(tmp_path / "model", "Bert")
    loaded(tmp_path / "model")

    def never(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(loading, "check_parity", never)
    assert loaded(tmp_path / "model").notes == ()


def test_a_context_longer_than_its_positions_is_refused(tmp_path: Path) -> None:
    """RoBERTa's table has rows that no token has."""
    save(tmp_path, "Roberta")
    assert loaded(tmp_path).max_model_len == 318
    with pytest.raises(ModelRefused, match="319 is more than the 318 positions"):
        loaded(tmp_path, max_model_len=319)
