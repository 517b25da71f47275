"""Weights copied to another device, simulated by the host: bit-identical, in little memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.engine.families import build
from tidemill.engine.errors import ModelRefused
from tidemill.engine.model.config.hf_config import read_hf_config
from tidemill.engine.model.families.registry import architecture_of
from tidemill.engine.model.weights import weights
from tidemill.engine.model.weights.checkpoint import WHOLE, find_checkpoint
from tidemill.engine.model.weights.staging import Staging, Waits
from tidemill.engine.model.weights.weights import read_weights

CPU = torch.device("cpu")
BUFFER_BYTES = 4000


@dataclass
class LateDevice:
    """A device that reads a buffer until it is waited for, so that earlier writes show."""

    most_at_once: int = 0
    under_way: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def copy(self, to: Tensor, buffer: Tensor) -> Waits:
        """Start a copy."""
        to.copy_(buffer)
        copying = (to, buffer)
        self.under_way.append(copying)
        self.most_at_once = max(self.most_at_once, len(self.under_way))

        def wait() -> None:
            assert torch.equal(to, buffer)
            self.under_way = [other for other in self.under_way if other is not copying]

        return wait


def late_device(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    """Return a device with two small buffers, for all reads to the CPU from now on."""
    device = LateDevice()
    first, second = (torch.empty(BUFFER_BYTES, dtype=torch.uint8) for _ in range(2))
    monkeypatch.setattr(weights, "staging_for", lambda _: Staging(device.copy, (first, second)))
    return device


def read(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights in a folder by role."""
    checkpoint, hf_config = find_checkpoint(str(folder)), read_hf_config(str(folder))
    return read_weights(checkpoint, architecture_of(hf_config), dtype, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["LlamaConfig", "GptOssConfig", "MixtralConfig"])
def test_weights_are_those_that_are_read_in_place(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merged, transposed, interleaved or rounded; no buffer is read into before it was copied."""
    build(name).save_pretrained(tmp_path)  # type: ignore[operator]
    expected = read(tmp_path, dtype)
    device = late_device(monkeypatch)
    got = read(tmp_path, dtype)
    assert got.keys() == expected.keys()
    for role, tensor in got.items():
        assert torch.equal(tensor, expected[role]), role
    assert device.most_at_once == 2


def test_a_truncated_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is the same as for weights that are read in place."""
    build("LlamaConfig").save_pretrained(tmp_path)  # type: ignore[operator]
    hf_config, checkpoint = read_hf_config(str(tmp_path)), find_checkpoint(str(tmp_path))
    whole = (tmp_path / WHOLE).read_bytes()
    (tmp_path / WHOLE).write_bytes(whole[:-100])
    device = late_device(monkeypatch)
    with pytest.raises(ModelRefused, match="was truncated while it was read"):
        read_weights(checkpoint, architecture_of(hf_config), torch.float32, CPU)
    assert device.most_at_once == 2
