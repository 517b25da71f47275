"""Published models: their configs are understood, and give their known sizes."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.engine.model.published import BENCHMARK, OTHERS
from tests.engine.model.published_families import BY_FAMILY
from tests.engine.model.published_states import STATES
from tidemill.engine.model.config.hf_config import parse_hf_config
from tidemill.engine.model.families.registry import architecture_of
from tidemill.engine.model.weights.quantised.quantization_config import read_quantization_config
from tidemill.engine.model.weights.weight_map import weights_of

PUBLISHED = BENCHMARK | OTHERS | BY_FAMILY | STATES


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_understood_and_comes_to_the_size_that_it_is_known_by(
    name: str,
) -> None:
    """Sizes agree within half a percent; any wrong width would exceed that."""
    raw: dict[str, Any]
    raw, billions = PUBLISHED[name]
    hf_config = parse_hf_config(name, raw)
    architecture = architecture_of(hf_config)
    count = sum(prod(weight.shape) for weight in weights_of(architecture))
    assert count / 1e9 == pytest.approx(billions, rel=5e-3)
    quantization = read_quantization_config(hf_config, None)
    assert (quantization is None) == ("quantization_config" not in raw)


@pytest.mark.parametrize("name", BY_FAMILY)
def test_a_published_config_has_transformers_meaning(tmp_path: Path, name: str) -> None:
    """Fields that its class does not read change nothing; those left out are as it has them."""
    raw, _ = BY_FAMILY[name]
    (tmp_path / "config.json").write_text(
        json.dumps({key: value for key, value in raw.items() if key != "quantization_config"})
    )
    resolved = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
    plain = json.loads(json.dumps(resolved, default=str))
    assert architecture_of(parse_hf_config(name, raw)) == architecture_of(
        parse_hf_config(name, plain)
    )
