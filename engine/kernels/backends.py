"""Which attention backend serves a model on a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.kernels.attention import AttentionShape, MakesBackend
from engine.kernels.reference import ReferenceAttention


def choose_backend(
    shapes: Sequence[AttentionShape], dtype: torch.dtype, device: torch.device
) -> MakesBackend:
    """Return the device's own backend where it serves all these layers, else the reference."""
    if device.type == "cpu":
        from engine.kernels.cpu.attention import CpuAttention

        if CpuAttention.serves(shapes, dtype, device):
            return CpuAttention
    return ReferenceAttention
