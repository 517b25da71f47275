"""Text halves of multimodal models without a text-only class in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.engine.families import COMMON, FAMILIES, config_fields
from tidemill.engine.config import EngineConfig
from tidemill.engine.model.hf.forward import TransformersNetwork
from tidemill.engine.model.loading import load_model
from tidemill.engine.model.network.decoder import Decoder
from tidemill.engine.model.parity.logits import chunked_logits

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
VISION = {**SMALL, "num_attention_heads": 2}
MUSE = {
    **COMMON,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 12,
}
SPARK = {
    **MUSE,
    "mlp_layer_types": ["dense", "sparse"],
    "moe_intermediate_size": 48,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
AUDIO = {
    "out_hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_sizes": [2],
    "hidden_sizes": [32],
    "depths": [1],
}
PIXTRAL = {**VISION, "model_type": "pixtral", "image_size": 56, "patch_size": 14}
# The text's config and its fields, the whole model's prefix and further fields, and what runs it.
WHOLE: dict[str, tuple[str, dict[str, Any], str, dict[str, Any], type]] = {
    "Muse Glimmer": (
        "MuseGlimmerTextConfig",
        MUSE,
        "MuseGlimmer",
        {"vision_config": VISION},
        TransformersNetwork,
    ),
    "Muse Spark": (
        "MuseSparkTextConfig",
        SPARK,
        "MuseSpark",
        {"vision_config": VISION, "audio_config": AUDIO},
        TransformersNetwork,
    ),
    "Mistral 4": (
        "Mistral4Config",
        config_fields("Mistral4Config", FAMILIES["Mistral4Config"]),
        "Mistral3",
        {"vision_config": PIXTRAL, "image_token_index": 5},
        Decoder,
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_text_half_gives_the_logits_of_the_whole_model(tmp_path: Path, name: str) -> None:
    """Its multiplied and capped logits, too; a note contains the missing media."""
    config, fields, prefix, more, network = WHOLE[name]
    torch.manual_seed(7)
    text = getattr(transformers, config)(**fields).to_dict()
    whole = getattr(transformers, f"{prefix}Config")(text_config=text, **more)
    kind: Any = getattr(transformers, f"{prefix}ForConditionalGeneration")
    eager = kind._from_config(whole, attn_implementation="eager").eval()
    for parameter in eager.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    eager.save_pretrained(tmp_path)
    loaded = load_model(EngineConfig(str(tmp_path), device="cpu", dtype="float32"))
    assert isinstance(loaded.network, network)
    assert any("served without images" in note for note in loaded.notes)
    ids = torch.arange(6, 56)
    with torch.inference_mode():
        expected = eager(input_ids=ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(chunked_logits(loaded, ids)[0], expected, atol=1e-4, rtol=1e-4)
