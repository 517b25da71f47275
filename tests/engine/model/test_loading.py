"""What is served and what is refused, by name and with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.config import EngineConfig
from engine.errors import ModelRefused
from engine.model import swaps
from engine.model.forward import ATTENTION
from engine.model.loading import context_length, load_model, prepare, refuse_by_config
from tests.engine.families import COMMON, build

HYBRIDS = [
    "Qwen3NextConfig",
    "Qwen3_5TextConfig",
    "JambaConfig",
    "NemotronHConfig",
    "FalconH1Config",
    "MambaConfig",
    "Llama4TextConfig",
]
CPU = torch.device("cpu")


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_hybrid_is_refused_by_name_with_its_other_layers(family: str) -> None:
    """Layers that are no full or sliding-window attention are named in the refusal."""
    config = getattr(transformers, family)()
    with pytest.raises(ModelRefused, match=rf"{config.model_type}.*layers of type"):
        refuse_by_config("some/model", config)


def test_a_model_whose_state_is_outside_its_keys_and_values_is_refused() -> None:
    """An RNN smuggled into an MLP passes every config check; the proof finds it."""
    network: Any = build("Qwen3Config")
    network.config._attn_implementation = ATTENTION

    class Remembering(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden.cumsum(dim=1) / 10

    network.model.layers[1].mlp = Remembering()
    with pytest.raises(ModelRefused, match="gives other logits with paged attention"):
        prepare(network, EngineConfig("tiny"), torch.float32, CPU)


def test_a_model_without_attention_calls_is_refused() -> None:
    """RWKV makes no attention call at all."""
    config = transformers.RwkvConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32
    )
    network = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ModelRefused, match="made 0 attention calls"):
        prepare(network, EngineConfig("tiny"), torch.float32, CPU)


def test_a_bidirectional_model_is_refused() -> None:
    """BERT attends to what comes after: served causally it would be another model."""
    config = transformers.BertConfig(**(COMMON | {"num_key_value_heads": 4}))
    network: Any = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in network.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    network.config._attn_implementation = ATTENTION
    with pytest.raises(ModelRefused, match="gives other logits"):
        prepare(network, EngineConfig("tiny"), torch.float32, CPU)


@pytest.mark.parametrize("content", ["", "{", '{"model_type": "no_such_type"}'])
def test_a_folder_that_holds_no_model_is_refused(tmp_path: Path, content: str) -> None:
    """An empty, broken or unknown config says so with the folder's name."""
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelRefused, match=str(tmp_path)):
        load_model(EngineConfig(str(tmp_path)))


def test_remote_code_is_never_run(tmp_path: Path) -> None:
    """A config that brings its own class is refused and its file never imported."""
    (tmp_path / "config.json").write_text(
        '{"model_type": "mine", "auto_map": {"AutoConfig": "evil.Config"}}'
    )
    witness = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(witness)!r}, 'w')\nclass Config: pass\n")
    with pytest.raises(ModelRefused):
        load_model(EngineConfig(str(tmp_path)))
    assert not witness.exists()


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    """Only safetensors are read: a pickle could run code."""
    network: Any = build("LlamaConfig")
    network.config.save_pretrained(tmp_path)
    torch.save(network.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelRefused, match="safetensors"):
        load_model(EngineConfig(str(tmp_path)))


def test_quantised_weights_are_refused_by_name() -> None:
    """A quantised checkpoint would load as something else."""
    config = transformers.LlamaConfig(quantization_config={"quant_method": "fp8"})
    with pytest.raises(ModelRefused, match="quantised"):
        refuse_by_config("some/model", config)


def test_a_context_beyond_the_models_positions_is_refused() -> None:
    """--max-model-len may shorten the context, never stretch it."""
    config = transformers.LlamaConfig(max_position_embeddings=512)
    assert context_length(EngineConfig("m"), config) == 512
    assert context_length(EngineConfig("m", max_model_len=100), config) == 100
    with pytest.raises(ModelRefused, match="512 positions"):
        context_length(EngineConfig("m", max_model_len=513), config)


def test_rope_that_looks_at_the_whole_batch_is_kept_below_its_switch() -> None:
    """longrope switches by the longest row beside it; within the original context it never does."""
    config = transformers.LlamaConfig(
        max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "dynamic",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    )
    assert context_length(EngineConfig("m"), config) == 1024


def test_swaps_take_what_agrees_and_leave_the_rest() -> None:
    """Every norm and gate of a Llama is swapped; a norm that differs stays what it was."""
    network: Any = build("LlamaConfig")
    original = network.model.layers[2].input_layernorm

    class OddRMSNorm(type(original)):  # type: ignore[misc]
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden) * 1.5  # type: ignore[no-any-return]

    odd = OddRMSNorm(64)
    network.model.layers[2].input_layernorm = odd
    assert swaps.apply(network) == 4 * 3 + 1 - 1
    assert network.model.layers[2].input_layernorm is odd
    assert isinstance(network.model.norm, swaps.FusedRMSNorm)
    assert isinstance(network.model.layers[0].mlp, swaps.FusedGatedMLP)
