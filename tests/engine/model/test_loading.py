"""What is served and what is refused, by name and with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.config import EngineConfig
from engine.errors import ModelRefused
from engine.model.loading import context_length, load_model, refuse_by_config, widths
from tests.engine.families import build

HYBRIDS = [
    "Qwen3NextConfig",
    "Qwen3_5TextConfig",
    "JambaConfig",
    "NemotronHConfig",
    "FalconH1Config",
    "MambaConfig",
    "Llama4TextConfig",
]


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_hybrid_is_refused_by_name_with_its_other_layers(family: str) -> None:
    """Layers that are no full or sliding-window attention are named in the refusal."""
    config = getattr(transformers, family)()
    with pytest.raises(ModelRefused, match=rf"{config.model_type}.*layers of type"):
        refuse_by_config("some/model", config)


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


@pytest.mark.parametrize(("inner", "widest"), [(None, 256), (128, 128), ([64, 128, 96], 128)])
def test_configs_name_their_inner_width_in_several_ways(inner: Any, widest: int) -> None:
    """One number, one a layer, or none."""
    config = transformers.PretrainedConfig(hidden_size=64, intermediate_size=inner)
    assert widths(config) == (64, widest)
