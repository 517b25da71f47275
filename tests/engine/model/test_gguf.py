"""Models of GGUF files compute what transformers' class computes with the same weights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from tests.engine.families import build
from tests.engine.gguf_files import write_gguf
from tidemill.engine.config import EngineConfig
from tidemill.engine.inspection import NO_TEMPLATE, inspect_model
from tidemill.engine.load import load_served
from tidemill.engine.model.loading import load_model
from tidemill.engine.model.parity.logits import chunked_logits, compared_rows
from tidemill.engine.model.planning import plan_model
from tidemill.engine.storage.model_digest import sampled_digest

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


def served(file: Path) -> tuple[Any, Any]:
    """Return a file's engine, and a chat's reply."""
    dispatcher = load_served(EngineConfig(str(file), dtype="float32", device="cpu"))
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0}
    try:
        return dispatcher.info(), asyncio.run(
            dispatcher.respond("/v1/chat/completions", body, "id", 0)
        )
    finally:
        dispatcher.close()


def test_a_gguf_file_answers_chats_by_its_own_template(tmp_path: Path) -> None:
    """Its first load says what it dequantized; it is identified by its bytes."""
    file = write_gguf(tmp_path / "tiny.gguf", build("LlamaConfig"))
    info, reply = served(file)
    assert reply.status_code == 200, reply.body
    assert reply.body["usage"]["prompt_tokens"] == 2  # a token for each byte
    assert info.model == str(file)
    assert info.model_digest == sampled_digest(file)
    assert any(note.startswith("dequantized ") for note in info.notes)
    assert "dequantization" in info.load_seconds
    again, _ = served(file)
    assert not any(note.startswith("dequantized ") for note in again.notes)


def test_a_gguf_file_without_a_template_answers_text_only(tmp_path: Path) -> None:
    """For a chat, the error contains the option to pass."""
    file = write_gguf(tmp_path / "tiny.gguf", build("LlamaConfig"), template=None)
    _, reply = served(file)
    assert reply.status_code == 400
    assert reply.body["error"]["message"].startswith(
        "This model has no chat template: pass `--chat-template`"
    )
    report = inspect_model(EngineConfig(str(file)))
    assert not report.is_refused
    assert report.missing == (NO_TEMPLATE,)


def test_inspection_dequantizes_nothing_and_names_the_fault_of_a_file(tmp_path: Path) -> None:
    """A load reports the same fault."""
    file = write_gguf(tmp_path / "tiny.gguf", build("Qwen3Config"))
    report = inspect_model(EngineConfig(str(file), device="cpu"))
    assert (report.runs, report.model_type, report.faults) == ("native", "qwen3", ())
    assert report.plan is not None
    assert report.plan.notes == ("the first load dequantizes its weights and caches them",)
    assert not list(tmp_path.glob("weights/gguf/*/model.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])
    report = inspect_model(EngineConfig(str(file), device="cpu"))
    assert report.faults == (
        f"{file} is truncated: output.weight is incomplete; copy or download it again.",
    )
