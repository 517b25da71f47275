"""Device, dtype, step limits and context length of a model."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from ...config import EngineConfig
from ...errors import ModelRefused
from ...kernels.backends import check_device


class StepLimits(NamedTuple):
    """Limits of a step: its number of sequences and tokens."""

    max_num_seqs: int
    max_num_batched_tokens: int


LIMITS_OF_CPU = StepLimits(256, 2048)
# By bytes of a GPU, the largest first. More tokens make larger products, which use a card's
# arithmetic better, but each step needs memory for them in addition to its pages; logits of
# sequences take memory from these.
LIMITS_OF_GPU = (
    (60 * 2**30, StepLimits(1024, 8192)),
    (0, StepLimits(256, 4096)),
)

# An encoder's step: more tokens make a device no faster, and its other requests wait longer; texts
# are rarely shorter on average.
MOST_ENCODED_TOKENS = 2**15
TOKENS_A_TEXT = 16

# Operations per second of bf16 products per multiprocessor, by compute capability, newest first:
# for a card with that capability, at the share of its data sheet that is published for an H200.
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
    """Return the expected operations per second of a GPU's large products; else an H200's."""
    if device.type != "cuda":
        return FLOPS_OF_H200
    card = torch.cuda.get_device_properties(device)
    capability = card.major, card.minor
    each = next(flops for least, flops in FLOPS_OF_MULTIPROCESSOR if capability >= least)
    return float(card.multi_processor_count * each)


def step_limits(
    settings: EngineConfig, device: torch.device, num_graph_tokens: int = 0
) -> StepLimits:
    """Return the requested limits, else suitable ones; defaults are lowered to fit the device.

    `num_graph_tokens`, of an encoder on a GPU, is the size of a step that takes the device as long
    as a host without graphs would need to launch it.
    """
    sequences, tokens = settings.max_num_seqs, settings.max_num_batched_tokens
    usual = LIMITS_OF_CPU
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        usual = next(limits for least, limits in LIMITS_OF_GPU if total >= least)
        most = max(usual.max_num_batched_tokens, min(num_graph_tokens, MOST_ENCODED_TOKENS))
        usual = StepLimits(max(usual.max_num_seqs, most // TOKENS_A_TEXT), most)
    return StepLimits(
        sequences or min(usual.max_num_seqs, tokens or usual.max_num_seqs),
        tokens or max(usual.max_num_batched_tokens, sequences or 0),
    )


def choose_steps_ahead(settings: EngineConfig, device: torch.device) -> int:
    """Return how many steps are prepared while another runs: by default one on a GPU."""
    return int(device.type == "cuda") if settings.steps_ahead is None else settings.steps_ahead


def choose_device(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """Return the requested device; `auto` is a GPU if there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        helps = "check that nvidia-smi lists one; start a container with --gpus all"
        if torch.version.cuda is None:
            helps = "this torch is built for CPUs only; install a build with CUDA"
        raise ModelRefused(f"--device cuda was requested, but torch finds no CUDA device: {helps}.")
    device = torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
    check_device(device)
    return device


def choose_planned_device(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """Return the device of a plan: that of a load, or another machine's GPU if requested."""
    return torch.device("cuda") if name == "cuda" and not has_gpu() else choose_device(name)


def has_gpu() -> bool:
    """Return whether there is a GPU here."""
    return torch.cuda.is_available()


def choose_dtype(name: str, stored: torch.dtype | None, device: torch.device) -> torch.dtype:
    """Return the requested dtype; `auto` is the stored one, or one that the CPU supports."""
    if name != "auto":
        chosen = getattr(torch, name)
        assert isinstance(chosen, torch.dtype)
        return chosen
    stored = stored or torch.float32
    if device.type == "cpu" and stored != torch.float32 and not _cpu_has_bfloat16():
        return torch.float32
    if device.type == "cpu" and stored == torch.float16:
        return torch.bfloat16  # CPUs have no fast fp16 arithmetic
    return stored


def device_name(config: EngineConfig) -> str:
    """Return the name of an engine's device: `cpu`, or the name of a GPU."""
    device = choose_device(config.device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def context_length(settings: EngineConfig, positions: int | None) -> int:
    """Return the longest sequence to serve; refuse one beyond the model's positions."""
    if settings.max_model_len is None:
        return positions or 4096
    if positions and settings.max_model_len > positions:
        raise ModelRefused(
            f"{settings.model}: --max-model-len {settings.max_model_len} is more than the "
            f"{positions} positions that this model supports. If its model card describes a longer "
            "context with YaRN, pass those rope parameters with --hf-overrides."
        )
    return settings.max_model_len


def _cpu_has_bfloat16() -> bool:
    """Return whether the CPU has bfloat16 instructions; emulated products are 3-5 times slower."""
    # torch has no public API for this.
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()  # noqa: SLF001
