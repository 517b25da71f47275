"""Where a model runs and how: its device, its dtype, and the longest sequence that it serves."""

from __future__ import annotations

from typing import Literal

import torch

from engine.config import EngineConfig
from engine.errors import ModelRefused
from engine.kernels.backends import check_device


def choose_device(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """Return the device that was asked for; `auto` takes a GPU if there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelRefused("--device cuda was asked for, but torch sees no CUDA device here.")
    device = torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
    check_device(device)
    return device


def choose_dtype(name: str, stored: torch.dtype | None, device: torch.device) -> torch.dtype:
    """Return the dtype that was asked for; `auto` takes the stored one, or what the CPU can do."""
    if name != "auto":
        chosen = getattr(torch, name)
        assert isinstance(chosen, torch.dtype)
        return chosen
    stored = stored or torch.float32
    if device.type == "cpu" and stored != torch.float32 and not _cpu_has_bfloat16():
        return torch.float32
    if device.type == "cpu" and stored == torch.float16:
        return torch.bfloat16  # the CPU has no fp16 arithmetic worth using
    return stored


def context_length(settings: EngineConfig, positions: int | None) -> int:
    """Return the longest sequence to serve; refuse one that the positions cannot tell apart."""
    if settings.max_model_len is None:
        return positions or 4096
    if positions and settings.max_model_len > positions:
        raise ModelRefused(
            f"{settings.model}: --max-model-len {settings.max_model_len} is more than the "
            f"{positions} positions that this model can tell apart here."
        )
    return settings.max_model_len


def _cpu_has_bfloat16() -> bool:
    """Say whether bfloat16 products are instructions here; emulated they are 3-5 times slower."""
    # torch tells this nowhere else.
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()  # noqa: SLF001
