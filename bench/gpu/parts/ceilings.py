"""Ceilings of the card, by torch's own functions, and the host's cost of a launch."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from bench.gpu.parts.task import Numbers, Place, Task
from tidemill.engine.kernels.backends import choose_elementwise

COPIED_BYTES = 2 * 2**30
WIDTH = 8192
LAUNCHES = 1000


def tasks(place: Place) -> Iterator[Task]:
    """Yield a copy, products in each dtype, and launches of a norm of one row."""
    yield Task("copy", lambda: copy(place))
    yield Task("product", lambda: product(place, place.dtype))
    yield Task("product, float16", lambda: product(place, torch.float16))
    yield Task("launch", lambda: launch(place))


def copy(place: Place) -> Numbers:
    """Measure a copy: bytes are those read and those written."""
    count = 2**16 if place.is_tiny else COPIED_BYTES
    source = torch.ones(count, dtype=torch.int8, device=place.device)
    target = torch.empty_like(source)
    seconds = place.seconds(lambda: target.copy_(source))
    return {"bytes_per_second": 2 * count / seconds}


def product(place: Place, dtype: torch.dtype) -> Numbers:
    """Measure a square product."""
    width = 64 if place.is_tiny else WIDTH
    left, right = torch.randn(2, width, width, device=place.device).to(dtype)
    return {"flops_per_second": 2 * width**3 / place.seconds(lambda: left @ right)}


def launch(place: Place) -> Numbers:
    """Measure what calling a kernel of next to no work costs the host, and the device."""
    row = torch.ones(1, 64, dtype=place.dtype, device=place.device)
    blocks = choose_elementwise(place.dtype, place.device)
    weight = blocks.norm_weight(row[0], 0.0)
    blocks.rms_norm(row, weight, 1e-6)
    place.wait()
    count = 2 if place.is_tiny else LAUNCHES
    started = time.perf_counter()
    for _ in range(count):
        blocks.rms_norm(row, weight, 1e-6)
    host = time.perf_counter() - started
    place.wait()
    return {
        "host_seconds": host / count,
        "seconds": (time.perf_counter() - started) / count,
        "alone_seconds": place.seconds(lambda: blocks.rms_norm(row, weight, 1e-6)),
    }
