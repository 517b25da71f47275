"""Device, dtype, step limits and context length of a model."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from ...config import EngineConfig
from ...errors import ModelRefused
from ...kernels.backends import check_device


class StepLimits(NamedTuple):
    """Limits of a step: its sequences, and their tokens."""

    max_num_seqs: int
    max_num_batched_tokens: int


LIMITS_OF_CPU = StepLimits(256, 2048)
# By bytes of a GPU, the largest first. Tokens fill products, a card's arithmetic, and bound what a
# step holds beside its pages; logits of sequences take memory from these.
LIMITS_OF_GPU = (
    (60 * 2**30, StepLimits(1024, 8192)),
    (0, StepLimits(256, 4096)),
)

# Operations a second of bf16 products, of a multiprocessor by its compute capability, the newest
# first: of a card that has it, at the share of its data sheet that an H200 is published to reach.
FLOPS_OF_MULTIPROCESSOR = (
    ((12, 0), 400e12 / 188),  # RTX PRO 6000
    ((10, 0), 1800e12 / 148),  # B200
    ((9, 0), 790e12 / 132),  # H100, H200
    ((8, 9), 97e12 / 58),  # L4
    ((8, 6), 100e12 / 72),  # A10
    ((0, 0), 249e12 / 108),  # A100
)
FLOPS_OF_H200 = 790e12


def matmul_flops(device: torch.device) -> float:
    """Return the operations a second that a GPU's large products should reach; else an H200's."""
    if device.type != "cuda":
        return FLOPS_OF_H200
    card = torch.cuda.get_device_properties(device)
    capability = card.major, card.minor
    each = next(flops for least, flops in FLOPS_OF_MULTIPROCESSOR if capability >= least)
    return float(card.multi_processor_count * each)


def step_limits(settings: EngineConfig, device: torch.device) -> StepLimits:
    """Return what was asked for, else what suits the device; what was not asked for gives way."""
    sequences, tokens = settings.max_num_seqs, settings.max_num_batched_tokens
    usual = LIMITS_OF_CPU
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        usual = next(limits for least, limits in LIMITS_OF_GPU if total >= least)
    return StepLimits(
        sequences or min(usual.max_num_seqs, tokens or usual.max_num_seqs),
        tokens or max(usual.max_num_batched_tokens, sequences or 0),
    )


def choose_device(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """Return the device that was asked for; `auto` takes a GPU if there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        helps = "nvidia-smi should list one, and a container is given it by --gpus all"
        if torch.version.cuda is None:
            helps = "this torch is built for CPUs alone, install one that is built with CUDA"
        raise ModelRefused(
            f"--device cuda was asked for, but torch sees no CUDA device here: {helps}."
        )
    device = torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
    check_device(device)
    return device


def choose_planned_device(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """Return the device of a plan: that of a load, or a GPU of another machine if asked for."""
    return torch.device("cuda") if name == "cuda" and not has_gpu() else choose_device(name)


def has_gpu() -> bool:
    """Say whether there is a GPU here."""
    return torch.cuda.is_available()


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


def device_name(config: EngineConfig) -> str:
    """Return what the device of an engine is called: `cpu`, or the name of a GPU."""
    device = choose_device(config.device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def context_length(settings: EngineConfig, positions: int | None) -> int:
    """Return the longest sequence to serve; refuse one that the positions cannot tell apart."""
    if settings.max_model_len is None:
        return positions or 4096
    if positions and settings.max_model_len > positions:
        raise ModelRefused(
            f"{settings.model}: --max-model-len {settings.max_model_len} is more than the "
            f"{positions} positions that this model can tell apart here; where its model card "
            "describes longer contexts by YaRN, --hf-overrides takes what it says."
        )
    return settings.max_model_len


def _cpu_has_bfloat16() -> bool:
    """Say whether bfloat16 products are instructions here; emulated they are 3-5 times slower."""
    # torch tells this nowhere else.
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()  # noqa: SLF001
