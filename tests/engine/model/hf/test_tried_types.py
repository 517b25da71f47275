"""Types that transformers' classes are tried for, in the version that is installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.models_page import tried_types
from tests.engine.families import COMMON, LATENT, SIGMOID_EXPERTS
from tidemill.engine.config import EngineConfig
from tidemill.engine.errors import ModelRefused
from tidemill.engine.model.hf.forward import TransformersNetwork
from tidemill.engine.model.loading import load_model

# Fields in addition to those that are common to families.
FIELDS: dict[str, dict[str, Any]] = {
    "minicpm3": LATENT,
    "sarvam_mla": SIGMOID_EXPERTS | LATENT | {"q_lora_rank": None},
    "sarvam_moe": SIGMOID_EXPERTS,
    "youtu": LATENT | {"head_dim": 8},
}
# Their classes have no small models by the common names of fields, or need another package.
NOT_SMALL = {
    *("axk1", "beam", "cohere_compass_text", "dbrx", "flint", "gemma3n", "gemma3n_text"),
    *("got_ocr2", "kolibri1", "laguna", "longcat_flash", "mellum", "phi4_multimodal"),
}


def small_models(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield each tried type with the folder of a small model of it."""
    for kind in tried_types():
        if kind not in NOT_SMALL:
            torch.manual_seed(7)
            config = AutoConfig.for_model(kind, **COMMON | FIELDS.get(kind, {}))
            AutoModelForCausalLM.from_config(config).save_pretrained(folder / kind)
            yield kind, folder / kind


@pytest.mark.long
def test_each_tried_type_runs_or_is_refused_with_a_reason(tmp_path: Path) -> None:
    """A new version of transformers brings new types, and changes what others do."""
    refused = set()
    for kind, folder in small_models(tmp_path):
        try:
            loaded = load_model(EngineConfig(str(folder), device="cpu", dtype="float32"))
        except ModelRefused:
            refused.add(kind)
        else:
            assert isinstance(loaded.network, TransformersNetwork), kind
    assert refused == {"bert-generation"}
