"""Models of GGUF files compute what transformers' class computes with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from tests.engine.families import build
from tests.engine.gguf_files import write_gguf
from tidemill.engine.config import EngineConfig
from tidemill.engine.model.loading import load_model
from tidemill.engine.model.parity import chunked_logits, compared_rows
from tidemill.engine.model.planning import plan_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + i / 8 for i in range(6)],
    "long_factor": [2.0 + i for i in range(6)],
    "partial_rotary_factor": 0.75,
}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}, {}),
    "llama, tied": ("LlamaConfig", {"tie_word_embeddings": True}, {}),
    "llama 3": ("LlamaConfig", {"rope_parameters": LLAMA3}, {}),
    "llama, stretched": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "qwen2": ("Qwen2Config", {}, {}),
    "qwen3": ("Qwen3Config", {}, {}),
    "qwen3moe": ("Qwen3MoeConfig", {"norm_topk_prob": True}, {}),
    "gemma2": ("Gemma2Config", {}, {}),
    "gemma3": ("Gemma3TextConfig", {}, {"attention.sliding_window_pattern": 6}),
    "phi3": ("Phi3Config", {"sliding_window": 12}, {}),
    "phi4-mini": (
        "Phi3Config",
        {
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 512,
            "tie_word_embeddings": True,
            "sliding_window": None,
        },
        {},
    ),
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_WEIGHTS_CACHE", str(tmp_path / "weights"))


@pytest.mark.parametrize("name", MODELS)
def test_a_gguf_file_gives_the_logits_of_the_model_it_was_made_of(
    tmp_path: Path, name: str
) -> None:
    """Its own network computes them, in fp32 up to rounding."""
    kind, differs, metadata = MODELS[name]
    network = build(kind, **differs)
    file = write_gguf(tmp_path / "tiny.gguf", network, metadata=metadata)
    settings = EngineConfig(str(file), dtype="float32", device="cpu")
    plan = plan_model(settings)
    assert plan.runs == "native", plan.why
    loaded = load_model(settings)
    assert not any("transformers runs" in note for note in loaded.notes)
    tokens = torch.randint(0, 300, (60,), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected = network(tokens[None], use_cache=False).logits[0]
        got = chunked_logits(loaded, tokens)
    rows = compared_rows(len(tokens))
    torch.testing.assert_close(got[0], expected[rows], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_quantized_weights_are_those_that_the_gguf_package_reads(tmp_path: Path, kind: str) -> None:
    """They are rounded to bf16; floats stay as they are."""
    network = build("LlamaConfig")
    quantized = getattr(gguf.GGMLQuantizationType, kind)
    file = write_gguf(tmp_path / "tiny.gguf", network, quantized=quantized)
    loaded = load_model(EngineConfig(str(file), dtype="float32", device="cpu"))
    for parameter in network.parameters():
        if parameter.ndim > 1:
            stored = gguf.dequantize(gguf.quantize(parameter.numpy(), quantized), quantized)
            rounded = torch.from_numpy(stored)
            if kind.startswith("Q"):
                rounded = rounded.bfloat16().float()
            parameter.data = rounded
    tokens = torch.arange(40)
    with torch.inference_mode():
        expected = network(tokens[None], use_cache=False).logits[0]
    rows = compared_rows(len(tokens))
    got = chunked_logits(loaded, tokens)[0]
    torch.testing.assert_close(got, expected[rows], rtol=2e-4, atol=2e-4)
