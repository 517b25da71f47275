"""A speech model is loaded completely, checked against transformers, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.speech_models import SHAPES, save
from tidemill.engine.config import EngineConfig
from tidemill.engine.errors import ModelRefused
from tidemill.engine.model.parity import parity_inputs
from tidemill.engine.model.speech import loading
from tidemill.engine.model.speech.loading import LoadedSpeech, check_parity, load_speech
from tidemill.engine.model.speech.whisper import WhisperModel
from tidemill.engine.model.weights.checkpoint import WHOLE, find_checkpoint


def load(folder: Path, dtype: Any = "float32") -> LoadedSpeech:
    """Load the model in a folder on the CPU."""
    return load_speech(EngineConfig(str(folder), device="cpu", dtype=dtype))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_model_is_the_function_that_transformers_has(tmp_path: Path, shape: str) -> None:
    """In fp32 only the order of sums differs, and in bf16 only the rounding."""
    save(tmp_path, shape)
    exact = check_parity(find_checkpoint(str(tmp_path)), load(tmp_path))
    rounded = check_parity(find_checkpoint(str(tmp_path)), load(tmp_path, "bfloat16"))
    assert exact.holds
    assert exact.distance < 5e-5
    assert rounded.holds
    assert 1e-4 < rounded.distance < 0.2


def test_a_network_that_computes_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is other about it, before it answers anything."""
    save(tmp_path, "English alone")
    encode = WhisperModel.encode

    def encode_louder(*arguments: Any) -> torch.Tensor:
        return 1.01 * encode(*arguments)

    monkeypatch.setattr(WhisperModel, "encode", encode_louder)
    with pytest.raises(ModelRefused, match="logits differ from transformers"):
        load(tmp_path)


def test_where_fp32_does_not_fit_the_first_layers_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A note informs the user."""
    save(tmp_path, "English alone")
    monkeypatch.setattr(parity_inputs, "free_bytes", lambda _: 0)
    (note,) = load(tmp_path).notes
    assert "first 2 layers" in note


def without(folder: Path, *keys: str) -> None:
    """Remove tensors from a folder's weights."""
    kept = {key: value for key, value in load_file(folder / WHOLE).items() if key not in keys}
    save_file(kept, folder / WHOLE, {"format": "pt"})


def test_missing_weights_are_named(tmp_path: Path) -> None:
    """A model of which a part was random would write nonsense."""
    save(tmp_path, "English alone")
    without(tmp_path, "model.encoder.conv1.weight")
    with pytest.raises(ModelRefused, match=r"lack model\.encoder\.conv1\.weight"):
        load(tmp_path)


def test_weights_of_a_bare_model_are_found(tmp_path: Path) -> None:
    """They have no prefix; the head is the embedding."""
    model = save(tmp_path, "English alone")
    expected = loading.chunked_logits(load(tmp_path))
    tensors = {key.removeprefix("model."): value for key, value in model.state_dict().items()}
    tensors.pop("proj_out.weight")
    save_file(tensors, tmp_path / WHOLE, {"format": "pt"})
    assert torch.equal(loading.chunked_logits(load(tmp_path)), expected)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    """Otherwise no transcript could be trusted."""
    save(tmp_path, "English alone")
    tensors = load_file(tmp_path / WHOLE)
    tensors["model.decoder.layer_norm.bias"][:] = float("nan")
    save_file(tensors, tmp_path / WHOLE, {"format": "pt"})
    with pytest.raises(ModelRefused):
        load(tmp_path)
