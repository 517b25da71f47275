"""The file of tuned tiles: its content, the entry that applies, and errors of an invalid file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from tidemill.engine.kernels.attention import AttentionShape
from tidemill.engine.kernels.triton import tuned_tiles
from tidemill.engine.kernels.triton.flash import attention_config
from tidemill.engine.kernels.triton.launch import cdiv, next_power_of_2
from tidemill.engine.kernels.triton.tuned_tiles import (
    KernelConfig,
    config_for,
    override_configs,
    parse_configs,
)

FOLDER = Path(tuned_tiles.__file__).parent
ANY = {"sizes": {}, "num_warps": 4, "num_stages": 1}


def test_the_file_is_sound_and_of_the_kernels_that_there_are() -> None:
    """Every kernel that reads the file is in it, and no other."""
    entries = parse_configs(json.loads(tuned_tiles.FILE.read_text(encoding="utf-8")))
    sources = "".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("*.py"))
    assert set(re.findall(r'config_for\(\s*"(\w+)"', sources)) == entries.keys()


def test_the_entry_counts_that_says_most(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Among matching entries the most specific applies; of equals the last."""
    listed = [
        {**ANY, "num_warps": 1},
        {**ANY, "num_warps": 2, "where": {"width": 8}},
        {**ANY, "num_warps": 4, "where": {"arch": "sm_90"}},
        {**ANY, "num_warps": 8, "where": {"arch": "sm_90", "width": 16}},
    ]
    file = tmp_path / "choices.json"
    file.write_text(json.dumps({"norm": listed}))
    monkeypatch.setattr(tuned_tiles, "FILE", file)
    tuned_tiles._tuned_configs.cache_clear()
    with override_configs({}):
        found = [
            config_for("norm", arch, width=width).num_warps
            for arch in ("sm_80", "sm_90")
            for width in (4, 8, 16)
        ]
    tuned_tiles._tuned_configs.cache_clear()
    assert found == [1, 2, 1, 4, 4, 8]


def test_overrides_apply_within_their_context_and_requests_are_reported() -> None:
    """Whatever the file says."""
    kernel = min(parse_configs(json.loads(tuned_tiles.FILE.read_text(encoding="utf-8"))))
    before = config_for(kernel, "sm_90", width=1)
    tried, shape = KernelConfig({"BLOCK": 2}, 16, 7), frozenset({("arch", "sm_90"), ("width", 1)})
    with override_configs({(kernel, shape): tried}) as requested:
        assert config_for(kernel, "sm_90", width=1) == tried
        assert requested == {(kernel, shape)}
        assert config_for(kernel, "sm_90", width=3) == before
    assert config_for(kernel, "sm_90", width=1) == before


def test_values_cached_for_a_choice_are_recomputed_for_another() -> None:
    """Otherwise they are cached across launches."""
    shape = AttentionShape(4, 2, 128, 128, 1.0)
    requested = frozenset({("arch", "sm_90"), ("width", 128), ("bits", 16)})
    tried = KernelConfig({"PLACES": 16}, 1, 1)

    def places() -> int:
        config = attention_config(shape, torch.bfloat16, "sm_90", is_wide=False)
        return config.sizes["PLACES"]

    before = places()
    with override_configs({("attention_narrow", requested): tried}):
        assert places() == 16 != before
    assert places() == before


@pytest.mark.parametrize("number", [1, 2, 3, 16, 17, 151_936])
def test_sizes_are_rounded_up(number: int) -> None:
    """They become powers of two and whole tiles, as in Triton's own functions."""
    assert next_power_of_2(number) == triton.next_power_of_2(number)
    assert cdiv(number, 16) == triton.cdiv(number, 16)


BROKEN: dict[str, list[dict[str, Any]]] = {
    "norm: one entry must have an empty `where`": [{**ANY, "where": {"width": 8}}],
    "norm: two entries": [ANY, ANY],
    "norm[1]: num_warps is 3": [ANY, {**ANY, "where": {"width": 8}, "num_warps": 3}],
    "norm[0]: num_warps is 64": [{**ANY, "num_warps": 64}],
    "norm[0]: BLOCK is 48": [{**ANY, "sizes": {"BLOCK": 48}}],
    "norm[0]: num_stages is 0": [{**ANY, "num_stages": 0}],
    "norm[0]: unknown warps": [{**ANY, "warps": 4}],
}


@pytest.mark.parametrize("error", BROKEN)
def test_errors_contain_their_place(error: str) -> None:
    """An invalid file is detected before a kernel is compiled."""
    with pytest.raises(ValueError, match=re.escape(error)):
        parse_configs({"norm": BROKEN[error]})
