"""Known faults of transformers' classes: each is visible in its weights, and corrected."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.families import build
from tidemill.engine.config import EngineConfig
from tidemill.engine.errors import ModelRefused
from tidemill.engine.model.hf import known_faults
from tidemill.engine.model.loading import load_model


@torch.no_grad()
def save_nemotron_with_small_steps(folder: Path) -> None:
    """Save a Nemotron-H whose dt is below `time_step_min`, which is 0.001."""
    network = build("NemotronHConfig")
    for name, weight in network.named_parameters():
        if name.endswith("dt_bias"):
            weight.fill_(-8.0)  # dt is 0.0003
        if name.endswith(".D"):
            weight.zero_()
        if "in_proj" in name:
            weight.mul_(4.0)
    network.save_pretrained(folder)


def test_nemotron_h_is_compared_without_a_limit_of_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its authors' code has none; uncorrected, the check would refuse our decoder."""
    save_nemotron_with_small_steps(tmp_path)
    settings = EngineConfig(str(tmp_path), device="cpu", dtype="float32")
    with monkeypatch.context() as uncorrected:
        uncorrected.setattr(known_faults, "FAULTS", ())
        with pytest.raises(ModelRefused, match="its logits differ from transformers'"):
            load_model(settings)
    loaded = load_model(settings)
    assert not any("transformers runs" in note for note in loaded.notes)
