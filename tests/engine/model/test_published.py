"""Published models: their configs are understood, and come to the sizes that they are known by."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from tests.engine.model.published import BENCHMARK, OTHERS
from tidemill.engine.model.families.registry import architecture_of
from tidemill.engine.model.hf_config import parse_hf_config
from tidemill.engine.model.quantised.quantization_config import read_quantization_config
from tidemill.engine.model.weight_map import weights_of

PUBLISHED = BENCHMARK | OTHERS


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_understood_and_comes_to_the_size_that_it_is_known_by(
    name: str,
) -> None:
    """Within half a percent, which another width of anything would exceed."""
    said: dict[str, Any]
    said, billions = PUBLISHED[name]
    hf_config = parse_hf_config(name, said)
    architecture = architecture_of(hf_config)
    count = sum(prod(weight.shape) for weight in weights_of(architecture))
    assert count / 1e9 == pytest.approx(billions, rel=5e-3)
    quantization = read_quantization_config(hf_config, None)
    assert (quantization is None) == ("quantization_config" not in said)
