"""Values of a config.json that tools write in other types, and defaults of missing fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.families import build
from tests.engine.model.families.test_families import raw_config
from tidemill.engine.config import EngineConfig
from tidemill.engine.errors import ModelRefused
from tidemill.engine.model.config.hf_config import normalise, parse_hf_config
from tidemill.engine.model.config.transformers_fields import class_defaults
from tidemill.engine.model.families.registry import architecture_of
from tidemill.engine.model.loading import load_model
from tidemill.engine.model.network.decoder import Decoder
from tidemill.engine.model.planning import plan_model
from tidemill.engine.model.weights.quantised.quantization_config import read_quantization_config


@pytest.mark.parametrize(
    ("raw", "dtype"),
    [
        *((name, torch.bfloat16) for name in ("bf16", "torch.bfloat16", "bfloat16")),
        *((name, torch.float16) for name in ("fp16", "half", "torch.float16", "torch.half")),
        *((name, torch.float32) for name in ("fp32", "float", "torch.float32")),
        ("auto", None),
    ],
)
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_dtype_has_several_names(key: str, raw: str, dtype: torch.dtype | None) -> None:
    """The names are torch's, with and without its prefix, and other tools'."""
    whole = {"model_type": "gemma3", "text_config": {key: raw, "model_type": "gemma3_text"}}
    for config in ({"model_type": "llama", key: raw}, whole):
        assert parse_hf_config("m", config).dtype == dtype


def test_values_that_mean_something_else_stay_as_they_are() -> None:
    """These are fractions, numbers that are not counts, and names that are not dtypes."""
    raw = {
        "hidden_size": 64.5,
        "rope_theta": "far",
        "routed_scaling_factor": 2.0,
        "rope_parameters": {"factor": 8.0, "full_attention": {"rope_theta": "1e4"}},
        "torch_dtype": "bogus",
        "hidden_act": "auto",
    }
    got = normalise(raw)
    expected = raw | {"rope_parameters": {"factor": 8.0, "full_attention": {"rope_theta": 1e4}}}
    assert got == expected
    assert isinstance(got["routed_scaling_factor"], float)


def test_whole_numbers_and_a_rope_may_be_written_as_others(tmp_path: Path) -> None:
    """Transformers' class reads the same numbers, and the proof holds."""
    build("Qwen3Config").save_pretrained(tmp_path)  # type: ignore[operator]
    path = tmp_path / "config.json"
    raw: dict[str, Any] = json.loads(path.read_bytes())
    raw |= {key: float(raw[key]) for key in ("max_position_embeddings", "num_hidden_layers")}
    raw["rope_parameters"] = raw["rope_parameters"] | {"rope_theta": "10000"}
    path.write_text(json.dumps(raw | {"dtype": "torch.bfloat16"}))
    loaded = load_model(EngineConfig(str(tmp_path), dtype="float32", device="cpu"))
    assert isinstance(loaded.network, Decoder)
    assert (loaded.max_model_len, loaded.notes) == (512, ())


@pytest.mark.parametrize("name", ["Qwen2Config", "Qwen3Config", "MistralConfig"])
def test_missing_fields_have_the_classs_defaults(name: str) -> None:
    """`test_families.py` compares such configs with transformers'."""
    raw = raw_config(name) | {"num_attention_heads": 32}
    defaults = dict(class_defaults(raw["model_type"]))
    less = {key: value for key, value in raw.items() if key not in defaults}
    assert len(raw) - len(less) == len(defaults) == 3
    assert architecture_of(parse_hf_config("m", less)) == architecture_of(
        parse_hf_config("m", less | defaults)
    )


def test_a_width_of_heads_that_is_null_is_the_hidden_size_by_heads() -> None:
    """Whatever the class has where the field is left out."""
    raw = raw_config("Ernie4_5Config")
    widths = [
        architecture_of(parse_hf_config("m", config)).blocks[0].attention.key_dim
        for config in (raw, raw | {"head_dim": None}, {**raw, "head_dim": 32})
    ]
    del raw["head_dim"]
    left_out = architecture_of(parse_hf_config("m", raw)).blocks[0].attention.key_dim
    assert (*widths, left_out) == (16, 16, 32, 128)


@pytest.mark.parametrize("activation", ["gelu_fast", "gelu_new"])
def test_an_activation_has_several_names(activation: str) -> None:
    """GPT-NeoX's are published with `gelu_fast`."""
    raw = raw_config("GPTNeoXConfig") | {"hidden_act": activation}
    assert architecture_of(parse_hf_config("m", raw)).gate == "gelu_tanh"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"quantization": {"group_size": 64, "bits": 4}}, "quantised with MLX (4 bits), but only"),
        (
            {"quantization_config": {"group_size": 64, "bits": 8, "mode": "affine"}},
            "quantised with MLX (8 bits), but only",
        ),
        (
            {"quantization_config": {"load_in_8bit": True, "llm_int8_threshold": 6.0}},
            "quantised with bitsandbytes, but only",
        ),
        (
            {"quantization_config": {"quant_algo": "NVFP4_AWQ"}},
            "with NVIDIA's ModelOpt (NVFP4_AWQ), but only",
        ),
        ({"quantization_config": {"x": 1}}, "with an unknown method (config.json: quantization_"),
    ],
)
def test_weights_of_other_tools_are_refused_by_the_tools_name(
    raw: dict[str, Any], words: str
) -> None:
    """A config that does not name its method is recognised, too."""
    with pytest.raises(ModelRefused) as refused:
        read_quantization_config(parse_hf_config("m", raw), None)
    assert words in str(refused.value)
    assert "use the unquantised model" in str(refused.value)


def test_a_config_within_one_that_has_none_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """Llama's config does not have a separate text config."""
    text = raw_config("LlamaConfig") | {"model_type": "unheard_of"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "text_config": text}))
    words = "config.json has a text_config, which transformers' LlamaConfig does not have"
    with pytest.raises(ModelRefused, match=words):
        plan_model(EngineConfig(str(tmp_path), device="cpu"))
