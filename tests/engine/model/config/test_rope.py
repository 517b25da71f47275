"""The frequencies of every kind of rope, against transformers' own to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from tidemill.engine.errors import ModelRefused
from tidemill.engine.model.config.hf_config import UnsupportedConfig
from tidemill.engine.model.config.rope import make_rope

SIZES: dict[str, Any] = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 1,
    "max_position_embeddings": 131_072,
    "vocab_size": 8,
    "intermediate_size": 8,
    "pad_token_id": 0,
}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e6},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 32_768,
    },
    "yarn, every field": {
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": 32.0,
        "beta_fast": 30.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "yarn with an explicit factor": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 32.0,
        "attention_factor": 1.25,
        "original_max_position_embeddings": 4096,
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_are_those_of_transformers(kind: str) -> None:
    """All frequencies agree, and the scale of cosines and sines."""
    config = transformers.LlamaConfig(**SIZES, rope_parameters=dict(KINDS[kind]))
    expected = LlamaRotaryEmbedding(config)
    rope = make_rope(KINDS[kind], 128, 131_072, 1e4)
    assert torch.equal(torch.tensor(rope.inv_freq), expected.inv_freq)
    assert rope.attention_scaling == expected.attention_scaling
    assert rope.max_positions == (262_144 if kind == "dynamic" else None)
    if kind == "dynamic":
        frequencies, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=262_144)
        assert torch.equal(torch.tensor(rope.long_inv_freq), frequencies)
        assert rope.original_positions == 131_072


@pytest.mark.parametrize(
    ("sections", "width"), [([11, 11, 10], 64), ([2, 1, 1], 8), ([11, 11, 10], 8), ([1, 1, 1], 16)]
)
def test_interleaved_axes_are_those_of_transformers(sections: list[int], width: int) -> None:
    """Frequencies have their own axes even if the sections are more or fewer, as in Qwen3.5."""
    parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    config = transformers.Qwen3_5TextConfig(
        head_dim=width, rope_parameters=parameters | {"partial_rotary_factor": 1.0}
    )
    axes = torch.arange(3.0)[:, None].repeat(1, width // 2)  # [3, R]
    expected = Qwen3_5TextRotaryEmbedding(config).recomposition_frequencies(axes)
    rope = make_rope(parameters, width, 64, 1e4, sections="interleaved")
    assert rope.axes == tuple(expected[: width // 2].int().tolist())


@pytest.mark.parametrize("length", [63, 64, 65, 255, 256])
def test_a_dynamic_rope_changes_beyond_the_positions_of_its_config(length: int) -> None:
    """A number of original positions has no effect, as in transformers."""
    parameters = KINDS["dynamic"] | {"original_max_position_embeddings": 64}
    config = transformers.LlamaConfig(
        **SIZES | {"max_position_embeddings": 256}, rope_parameters=dict(parameters)
    )
    network = LlamaRotaryEmbedding(config)
    network(torch.zeros(1), torch.arange(length)[None])
    rope = make_rope(parameters, 128, 256, 1e4)
    assert torch.equal(torch.tensor(rope.inv_freq), network.inv_freq)
    assert rope.original_positions == 256


@pytest.mark.parametrize("share", [1.0, 0.75])
def test_a_long_rope_has_frequencies_beyond_its_trained_length(share: float) -> None:
    """If only part of a head is rotated, the frequencies are those of that part."""
    count = int(128 * share) // 2
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": share,
        "short_factor": [1.0 + index / 50 for index in range(count)],
        "long_factor": [2.0 + index for index in range(count)],
        "original_max_position_embeddings": 4096,
    }
    config = transformers.Phi3Config(
        **SIZES, original_max_position_embeddings=4096, rope_parameters=dict(parameters)
    )
    expected = Phi3RotaryEmbedding(config)
    rope = make_rope(parameters, 128, 131_072, 1e4)
    assert torch.equal(torch.tensor(rope.inv_freq), expected.inv_freq)
    assert rope.attention_scaling == expected.attention_scaling > 1
    frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=4097)
    assert torch.equal(torch.tensor(rope.long_inv_freq), frequencies)
    assert rope.original_positions == 4096


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "llama3", "factor": 8.0},
        {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
        {"rope_type": "default", "rope_theta": float("inf")},
        {"rope_type": ["default"]},
        {"partial_rotary_factor": 1.5},
        {"factor": 2.0},
    ],
    ids=str,
)
def test_parameters_that_do_not_fit_are_not_understood(parameters: dict[str, Any]) -> None:
    """They have another type, too few or infinite numbers, or another kind."""
    with pytest.raises(UnsupportedConfig):
        make_rope(parameters, 128, 4096, 1e4)


@pytest.mark.parametrize("factor", ["x", 0.0, 0.5, -4, 1e300, True, float("nan")])
def test_a_factor_that_stretches_nothing_is_refused(factor: Any) -> None:
    """transformers would take it, with a warning at most."""
    with pytest.raises(ModelRefused, match="it must be a number from 1 to 10,000"):
        make_rope({"rope_type": "linear", "factor": factor}, 128, 4096, 1e4)


@pytest.mark.parametrize(
    ("parameters", "reach"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}, None),
        ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32_768}, 262_144),
        ({"rope_type": "yarn", "factor": 8.0}, None),
        ({"rope_type": "linear", "factor": 8.0}, None),
    ],
    ids=str,
)
def test_yarn_reaches_as_far_as_it_stretches(parameters: dict[str, Any], reach: int | None) -> None:
    """The reach exceeds the config's positions if the parameters contain the original ones."""
    assert make_rope(parameters, 128, 131_072, 1e4).max_positions == reach
