"""Models that transformers runs, and refusals by their config."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from tidemill.engine.errors import ModelRefused
from tidemill.engine.model.hf.model import positions_of, refuse_by_config, widths

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
    """The refusal names layers other than full or sliding-window attention."""
    config = getattr(transformers, family)()
    with pytest.raises(ModelRefused, match=rf"{config.model_type}.*layers of type"):
        refuse_by_config("some/model", config)


def test_quantised_weights_are_refused_by_name() -> None:
    """A quantised checkpoint would load as something else."""
    config = transformers.LlamaConfig(quantization_config={"quant_method": "fp8"})
    with pytest.raises(ModelRefused, match="quantised"):
        refuse_by_config("some/model", config)


def test_rope_that_looks_at_the_whole_batch_is_kept_below_its_switch() -> None:
    """longrope switches by the longest row of a batch, but never within the original context."""
    rope = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}
    factors = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    for kind, positions in (
        ({"rope_type": "longrope"} | factors, 1024),
        ({"rope_type": "dynamic"}, 4096),
    ):
        config = transformers.LlamaConfig(max_position_embeddings=4096, rope_parameters=rope | kind)
        assert positions_of(config) == positions
    assert positions_of(transformers.LlamaConfig(max_position_embeddings=4096)) == 4096


@pytest.mark.parametrize(
    ("inner", "max_intermediate_size"), [(None, 256), (128, 128), ([64, 128, 96], 128)]
)
def test_configs_name_their_inner_width_in_several_ways(
    inner: Any, max_intermediate_size: int
) -> None:
    """Configs have one number, one per layer, or none."""
    config = transformers.PretrainedConfig(hidden_size=64, intermediate_size=inner)
    assert widths(config) == (64, max_intermediate_size)
