"""A model that would run incorrectly is detected by running it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from tests.engine.families import COMMON, build
from tidemill.engine.config import EngineConfig
from tidemill.engine.errors import ModelRefused
from tidemill.engine.model.hf.forward import ATTENTION
from tidemill.engine.model.hf.model import prepare

CPU = torch.device("cpu")


def test_a_model_whose_state_is_outside_its_keys_and_values_is_refused() -> None:
    """An RNN smuggled into an MLP passes every config check; the proof finds it."""
    network: Any = build("Qwen3Config")
    network.config._attn_implementation = ATTENTION

    class Remembering(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden.cumsum(dim=1) / 10

    network.model.layers[1].mlp = Remembering()
    with pytest.raises(ModelRefused, match="its logits with paged attention differ"):
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
    with pytest.raises(ModelRefused, match="its logits with paged attention differ"):
        prepare(network, EngineConfig("tiny"), torch.float32, CPU)
