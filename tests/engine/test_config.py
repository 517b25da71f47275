"""The engine's settings refuse values that no engine could run with."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tidemill.engine.config import EngineConfig
from tidemill.protocol.contract import EngineError


def test_only_the_model_is_required() -> None:
    """Every other setting has a valid default."""
    config = EngineConfig("some/model")
    assert (config.dtype, config.device, config.max_model_len) == ("auto", "auto", None)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("dtype", "int8"),
        ("dtype", "FLOAT32"),
        ("device", "tpu"),
        ("device", ""),
        ("max_model_len", 0),
        ("max_model_len", -1),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("kv_cache_memory", 0),
        ("kv_cache_dtype", "fp8_e5m2"),
        ("steps_ahead", 2),
        ("steps_ahead", -1),
        ("admission", "longest"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(setting: str, value: Any) -> None:
    """The message names the setting and its value."""
    with pytest.raises(EngineError) as refused:
        EngineConfig("m", **{setting: value})
    assert setting in str(refused.value)
    assert str(value) in str(refused.value)


def test_a_step_must_have_room_for_every_running_sequence() -> None:
    """Each sequence takes one token per step, so a smaller budget would be exceeded."""
    assert EngineConfig("m", max_num_seqs=64, max_num_batched_tokens=64)
    with pytest.raises(EngineError, match="max_num_batched_tokens") as refused:
        EngineConfig("m", max_num_seqs=64, max_num_batched_tokens=63)
    assert "max_num_seqs" in str(refused.value)


def test_settings_do_not_change() -> None:
    """Validated settings stay valid."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig("m").seed = 8  # type: ignore[misc]
