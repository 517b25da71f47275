"""Noise is refused at load: weights of valid shapes that no trained model has."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.adapters import halves, write_adapter
from tests.engine.families import build
from tests.engine.model.encoders.small_encoders import FAMILIES
from tests.engine.model.encoders.small_encoders import loaded as load_encoder
from tests.engine.model.encoders.small_encoders import save as save_encoder
from tests.engine.speech_models import save as save_speech
from tidemill.engine.config import EngineConfig, LoraModule
from tidemill.engine.errors import ModelRefused
from tidemill.engine.model.loading import load_model
from tidemill.engine.model.speech.loading import load_speech
from tidemill.engine.model.weights.checkpoint import WHOLE
from tidemill.engine.model.weights.sanity import (
    check_logits,
    check_not_constant,
    check_numbers,
)

Change = Callable[[dict[str, Tensor]], object]
DOWN = "model.layers.1.mlp.down_proj.weight"


def change(folder: Path, how: Change) -> Path:
    """Change the stored weights of a folder."""
    tensors = load_file(folder / WHOLE)
    how(tensors)
    save_file(tensors, folder / WHOLE, metadata={"format": "pt"})
    return folder


def times(end: str, factor: float) -> Change:
    """Multiply all weights whose names end with a suffix."""

    def multiply(tensors: dict[str, Tensor]) -> None:
        tensors |= {key: one * factor for key, one in tensors.items() if key.endswith(end)}

    return multiply


NOISE: dict[str, tuple[Change, str]] = {
    "all weights are 0": (times("", 0), "every token of its vocabulary the same score"),
    "the last norm is 0": (times("model.norm.weight", 0), "the same score"),
    "the last norm is next to 0": (times("model.norm.weight", 1e-12), "the same score"),
    "the embedding is 0": (times("embed_tokens.weight", 0), "the same score"),
    "one channel drowns all others": (
        lambda tensors: tensors["model.embed_tokens.weight"][:, 3].fill_(1e4),
        "output does not depend on its input",
    ),
    "the head is 0": (times("lm_head.weight", 0), "the same score"),
    "one matrix is huge": (times(DOWN, 1e30), f"{DOWN} contains numbers up to .*e.29"),
    "one norm is huge": (times("layers.2.input_layernorm.weight", 1e30), "contains numbers up to"),
    "one row is NaN": (
        lambda tensors: tensors["model.embed_tokens.weight"][7].fill_(torch.nan),
        "embed_tokens.weight contains NaN or infinity",
    ),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("noise", NOISE)
def test_a_model_that_could_write_nothing_but_noise_is_refused(
    tmp_path: Path, noise: str, dtype: Any
) -> None:
    """Our decoder in bf16 refuses it, and so does transformers' class."""
    build("Qwen3Config").save_pretrained(tmp_path)  # type: ignore[operator]
    if dtype == "float32":
        raw = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(raw | {"attention_chunk_size": 7}))
    how, words = NOISE[noise]
    with pytest.raises(ModelRefused, match=words):
        load_model(EngineConfig(str(change(tmp_path, how)), dtype=dtype, device="cpu"))


def test_a_matrix_of_zeros_is_noted(tmp_path: Path) -> None:
    """Layers that were only just added have such ones; a file with a hole has, too."""
    build("Qwen3Config").save_pretrained(tmp_path)  # type: ignore[operator]
    config = EngineConfig(str(change(tmp_path, times(DOWN, 0))), dtype="float32", device="cpu")
    assert load_model(config).notes == (
        f"all numbers in {DOWN} are 0: copy the files again unless it is intended",
    )


@pytest.mark.parametrize(
    ("size", "words"), [(1e6, "adds numbers up to"), (1e7, "contains numbers up to")]
)
def test_an_adapter_that_drowns_its_model_is_refused(
    tmp_path: Path, size: float, words: str
) -> None:
    """Its product with the weights is beyond any trained one, or its files hold no such numbers."""
    network = build("Qwen3Config")
    network.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    modules = {
        name: (torch.full_like(down, size), torch.full_like(up, size))
        for name, (down, up) in halves(network).items()
    }
    folder = write_adapter(tmp_path / "own", modules)
    config = EngineConfig(
        str(tmp_path / "model"),
        dtype="bfloat16",
        device="cpu",
        lora_modules=(LoraModule("own", str(folder)),),
    )
    with pytest.raises(ModelRefused, match=f"adapter own .*{words}"):
        load_model(config)


@pytest.mark.parametrize("family", ["Bert", "Electra"])
def test_vectors_that_are_the_same_for_every_text_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Their last norm passes only its bias, in our networks and in transformers'."""
    monkeypatch.setitem(FAMILIES, "Electra", {"embedding_size": 16})
    folder = save_encoder(tmp_path, family)
    load_encoder(folder)
    change(folder, times("layer.2.output.LayerNorm.weight", 0))
    with pytest.raises(ModelRefused, match="output does not depend on its input"):
        load_encoder(folder)


def test_a_speech_model_of_zeros_is_refused(tmp_path: Path) -> None:
    """It is refused like a text model of zeros."""
    save_speech(tmp_path, "English alone")
    change(tmp_path, times("", 0))
    with pytest.raises(ModelRefused, match="the same score"):
        load_speech(EngineConfig(str(tmp_path), device="cpu", dtype="float32"))


def test_numbers_of_trained_models_are_accepted() -> None:
    """They have biases that exclude tokens, large embeddings, rows of zeros, and integers."""
    embedding = torch.randn(8, 4) * 1e4
    embedding[0] = 0
    zeros = check_numbers(
        "tiny",
        [
            ("lm_head.bias", torch.tensor([0.0, -1e9])),
            ("embedding", embedding.half()),
            ("words", torch.full((2, 2), 2**30)),
            ("nothing", torch.zeros(0, 4)),
            ("norm.weight", torch.zeros(4)),
            ("added", torch.zeros(2, 2)),
        ],
    )
    assert zeros == ["added"]
    logits = torch.randn(2, 5, 8)
    logits[:, 0] = 0  # of a token whose row is 0
    check_logits("tiny", logits)
    check_not_constant("tiny", torch.ones(1, 8))  # one row cannot be compared with another


@pytest.mark.parametrize(
    ("same", "other"),
    [
        (lambda one: one.expand(2, 5, 64), lambda one: torch.randn(2, 5, 64) + one),
        (
            lambda one: (2 * one * (1 + 2**-8 * torch.randn(2, 5, 64))).bfloat16(),
            lambda one: (2 * one * (1 + 2**-4 * torch.randn(2, 5, 64))).bfloat16(),
        ),
        (
            lambda one: torch.randn(2, 5, 64) + 20 * (one == one.max()),
            lambda one: torch.randn(2, 5, 64) + 8 * (one == one.max()),
        ),
    ],
    ids=["equal", "up to rounding", "by one token that is always certain"],
)
def test_answers_that_do_not_depend_on_tokens_are_refused(
    same: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor]
) -> None:
    """Though each of them prefers some token; those that do, a little, are taken."""
    one = torch.randn(64)
    with pytest.raises(ModelRefused, match="output does not depend on its input"):
        check_logits("tiny", same(one))
    check_logits("tiny", other(one))
