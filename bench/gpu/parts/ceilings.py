"""Ceilings of the card, by torch's own functions, and the gap between launches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton

from bench.gpu.parts.task import Numbers, Place, Task

COPIED_BYTES = 2 * 2**30
WIDTH = 8192
LAUNCHES = 1000
FP8 = torch.float8_e4m3fn


@triton.jit
def _empty(_nothing):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - Triton 3.6 reads annotations
    pass


def tasks(place: Place) -> Iterator[Task]:
    """Yield a copy, products in each dtype, and an empty kernel in a graph."""
    yield Task("copy", partial(copy, place), 2)
    yield Task("product", partial(product, place, place.dtype), 2)
    for is_fast in (True, False):
        name = f"product, fp8, {'fast' if is_fast else 'slow'} accumulation"
        yield Task(name, partial(fp8_product, place, is_fast=is_fast), 2)
    yield Task("launch gap in a graph", partial(gap, place), 2)


def copy(place: Place) -> Numbers:
    """Measure a copy: bytes are those read and those written."""
    count = 2**16 if place.is_tiny else COPIED_BYTES
    source = torch.ones(count, dtype=torch.int8, device=place.device)
    target = torch.empty_like(source)
    seconds = place.replay_seconds(lambda: target.copy_(source))
    return {"bytes_per_second": 2 * count / seconds}


def product(place: Place, dtype: torch.dtype) -> Numbers:
    """Measure a square product of random numbers."""
    width = 64 if place.is_tiny else WIDTH
    left, right = torch.randn(2, width, width, device=place.device).to(dtype)
    return {"flops_per_second": 2 * width**3 / place.replay_seconds(lambda: left @ right)}


def fp8_product(place: Place, *, is_fast: bool) -> Numbers:
    """Measure the same in fp8 with row scales, as in torch."""
    if place.is_tiny or torch.cuda.get_device_capability(place.device) < (8, 9):
        return {"skipped": "this device does not multiply fp8"}
    left, right = torch.randn(2, WIDTH, WIDTH, device=place.device).to(FP8)
    scales = torch.ones(WIDTH, 1, device=place.device)

    def multiply() -> torch.Tensor:
        return torch._scaled_mm(  # noqa: SLF001 - the name that torch 2.11 has
            left,
            right.T,
            scale_a=scales,
            scale_b=scales.T,
            out_dtype=torch.bfloat16,
            use_fast_accum=is_fast,
        )

    return {"flops_per_second": 2 * WIDTH**3 / place.replay_seconds(multiply)}


def gap(place: Place) -> Numbers:
    """Measure an empty kernel, one of many in a graph: the gap between two launches."""
    if place.is_tiny:
        return {"skipped": "no GPU"}
    nothing = torch.zeros(1, device=place.device)
    graph = place.captured(lambda: _empty[(1,)](nothing), LAUNCHES)
    return {"seconds": place.seconds(graph.replay) / LAUNCHES}
