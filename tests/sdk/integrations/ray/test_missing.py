"""Without the extra `ray`."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import tidemill.ray
from tidemill import TidemillError

NO_DATASET: Any = None


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error contains the command that installs it."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(TidemillError, match=r"needs ray, which is not installed: .*ray"):
        tidemill.ray.answer(NO_DATASET, prompt="{{ text }}")
    with pytest.raises(TidemillError, match="needs ray, which is not installed"):
        tidemill.ray.build_processor(tidemill.ray.vLLMEngineProcessorConfig(model_source="m"))


def test_code_that_depends_on_ray_internals_is_loaded_on_demand() -> None:
    """A release that changes Ray's own signatures breaks `build_processor`, never `answer`."""
    script = (
        "import sys, tidemill.ray\n"
        "print(*(name for name in sys.modules if 'tidemill' in name and 'processor' in name))\n"
        "print(tidemill.ray.build_processor.__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "\nbuild_processor\n"
