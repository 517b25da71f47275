"""Which kernels serve a model on a device: attention, products, what lies between, sampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch

from engine.errors import EngineError
from engine.kernels import blocks, experts, pooling, sampling
from engine.kernels.attention import AttentionShape, MakesBackend
from engine.kernels.blocks import Blocks
from engine.kernels.experts import MixesExperts
from engine.kernels.pooling import Pools
from engine.kernels.products import Products, prepack
from engine.kernels.reference import ReferenceAttention
from engine.kernels.sampling import ChoosesTokens

# Types of devices that Triton's kernels serve; what only compiles or interprets them says others.
TRITON_TYPES = {"cuda"}
# What they are compiled for: Ampere and later.
FIRST_CAPABILITY = (8, 0)


def has_triton(device: torch.device) -> bool:
    """Say whether a device's kernels are Triton's; on older GPUs all is torch's own."""
    if device.type == "cuda":
        return "cuda" in TRITON_TYPES and _capability(device.index) >= FIRST_CAPABILITY
    return device.type in TRITON_TYPES


@cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def check_device(device: torch.device) -> None:
    """Raise `EngineError` where a device's kernels cannot be launched, with what would help."""
    if device.type != "cuda" or not has_triton(device):
        return
    if torch.version.hip is not None:
        raise EngineError("Tidemill has no kernels for AMD's GPUs; --device cpu runs without one")
    try:
        from engine.kernels.triton.driver import why_not
    except ImportError as exc:
        raise EngineError(
            f"a GPU's kernels need triton, which cannot be imported here ({exc}): "
            "install the version that this torch names, or take --device cpu"
        ) from exc
    if (reason := why_not()) is not None:
        raise EngineError(f"a GPU's kernels cannot be launched here: {reason}; or --device cpu")


def choose_backend(
    shapes: Sequence[AttentionShape], dtype: torch.dtype, device: torch.device
) -> MakesBackend:
    """Return the device's own backend where it serves all these layers, else the reference."""
    if has_triton(device):
        from engine.kernels.triton.attention import TritonAttention

        if TritonAttention.serves(shapes, dtype):
            return TritonAttention
    elif device.type == "cpu":
        from engine.kernels.cpu.attention import CpuAttention

        if CpuAttention.serves(shapes, dtype, device):
            return CpuAttention
    return ReferenceAttention


def choose_blocks(dtype: torch.dtype, device: torch.device) -> Blocks:
    """Return the device's own functions where it has them for this dtype, else the reference."""
    if has_triton(device):
        from engine.kernels.triton import blocks as of_gpu
        from engine.kernels.triton.launching import DTYPES as OF_GPU

        if dtype in OF_GPU:
            return of_gpu
    elif device.type == "cpu":
        from engine.kernels.cpu import blocks as of_cpu
        from engine.kernels.cpu.scalars import DTYPES

        if dtype in DTYPES:
            return of_cpu
    return blocks


def choose_experts(dtype: torch.dtype, device: torch.device) -> MixesExperts:
    """Return the device's own functions where it has them for this dtype, else the reference."""
    if has_triton(device):
        from engine.kernels.triton import experts as of_gpu
        from engine.kernels.triton.launching import DTYPES as OF_GPU

        if dtype in OF_GPU:
            return of_gpu
    return experts


def choose_pooling(device: torch.device) -> Pools:
    """Return the device's own functions where it has them, else the reference."""
    if has_triton(device):
        from engine.kernels.triton import pooling as of_gpu

        return of_gpu
    return pooling


def choose_products(blocks: Blocks, device: torch.device) -> Products:
    """Return what makes products on a device: by its own kernel, else by oneDNN, else by torch."""
    if has_triton(device):
        from engine.kernels.triton import products as of_gpu

        ways = [of_gpu.prepare_scaled, of_gpu.prepare_fp8, of_gpu.prepare]
        return Products(blocks, [], quantised=ways)
    if device.type == "cpu":
        from engine.kernels.cpu.adapters import prepare_adapted
        from engine.kernels.cpu.products import prepare

        return Products(blocks, [prepare, prepack], prepare_adapted)
    return Products(blocks, [])


def multiplies_quantised(dtype: torch.dtype, device: torch.device) -> bool:
    """Say whether the device's products take quantised weights as they are."""
    return has_triton(device) and dtype in {torch.bfloat16, torch.float16}


def choose_sampling(dtype: torch.dtype, device: torch.device) -> ChoosesTokens:
    """Return the device's own functions where it has them for this dtype, else the reference."""
    if has_triton(device):
        from engine.kernels.triton import sampling as of_gpu

        return of_gpu
    if device.type == "cpu":
        from engine.kernels.cpu import sampling as of_cpu
        from engine.kernels.cpu.scalars import DTYPES

        if dtype in DTYPES:
            return of_cpu
    return sampling


@contextmanager
def lend_torch_the_threads(device: torch.device) -> Iterator[None]:
    """Let torch compute on as many threads as kernels do, for as long as this is entered."""
    if device.type != "cpu":
        yield
        return
    from engine.kernels.cpu.threads import team_size

    before = torch.get_num_threads()
    torch.set_num_threads(team_size())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def spare_torch_its_threads(device: torch.device) -> None:
    """Let torch compute on its callers' threads from now on, where kernels have a team of theirs.

    Its own threads look for work for a while after each function, on the cores that the team needs.
    """
    if device.type == "cpu":
        from engine.kernels.cpu.threads import team

        team()  # as many as torch has until now
        torch.set_num_threads(1)
