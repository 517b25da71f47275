"""Without the extra `ray`."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import tidemill.ray
from tidemill import TidemillError

NO_DATASET: Any = None


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that installs it."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(TidemillError, match=r"needs ray, which is not installed: .*ray"):
        tidemill.ray.answer(NO_DATASET, prompt="{{ text }}")
    with pytest.raises(TidemillError, match="needs ray, which is not installed"):
        tidemill.ray.build_processor(tidemill.ray.vLLMEngineProcessorConfig(model_source="m"))
