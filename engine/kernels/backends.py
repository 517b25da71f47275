"""Which kernels serve a model on a device: attention, products, what lies between, sampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from engine.kernels import blocks, sampling
from engine.kernels.attention import AttentionShape, MakesBackend
from engine.kernels.blocks import Blocks
from engine.kernels.products import Products, prepack
from engine.kernels.reference import ReferenceAttention
from engine.kernels.sampling import ChoosesTokens


def choose_backend(
    shapes: Sequence[AttentionShape], dtype: torch.dtype, device: torch.device
) -> MakesBackend:
    """Return the device's own backend where it serves all these layers, else the reference."""
    if device.type == "cpu":
        from engine.kernels.cpu.attention import CpuAttention

        if CpuAttention.serves(shapes, dtype, device):
            return CpuAttention
    return ReferenceAttention


def choose_blocks(dtype: torch.dtype, device: torch.device) -> Blocks:
    """Return the device's own functions where it has them for this dtype, else the reference."""
    if device.type == "cpu":
        from engine.kernels.cpu import blocks as of_cpu
        from engine.kernels.cpu.scalars import DTYPES

        if dtype in DTYPES:
            return of_cpu
    return blocks


def choose_products(blocks: Blocks, device: torch.device) -> Products:
    """Return what makes products on a device: by its own kernel, else by oneDNN, else by torch."""
    if device.type == "cpu":
        from engine.kernels.cpu.adapters import prepare_adapted
        from engine.kernels.cpu.products import prepare

        return Products(blocks, [prepare, prepack], prepare_adapted)
    return Products(blocks, [])


def choose_sampling(dtype: torch.dtype, device: torch.device) -> ChoosesTokens:
    """Return the device's own functions where it has them for this dtype, else the reference."""
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
