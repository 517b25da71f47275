"""Measures the host time of a layer's launches, below which a step is worth a CUDA graph."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import cache

import torch

from ..kernels.backends import choose_elementwise

logger = logging.getLogger(__name__)

# Host time of a layer's launches where one from Python takes LAUNCH_SECONDS, as on an H100's host.
LAYER_SECONDS, LAUNCH_SECONDS = 1e-3, 70e-6
# Limits on the measured time, relative to that.
FASTEST, SLOWEST = 0.1, 3.0
RUNS, LAUNCHES = 5, 4
# Width of the launched norm: that of a model whose kernels an image contains.
WIDTH = 1024


@cache
def layer_seconds(device: torch.device) -> float:
    """Return the host time in which a layer is launched on a device, measured in about 1 ms."""
    if device.type != "cuda":
        return LAYER_SECONDS
    blocks = choose_elementwise(torch.bfloat16, device)
    x = torch.zeros(1, WIDTH, dtype=torch.bfloat16, device=device)
    seconds = launch_seconds(lambda: blocks.rms_norm(x, x[0], 1e-6))
    logger.info("a launch takes %.0f µs", 1e6 * seconds)
    return LAYER_SECONDS * min(max(seconds / LAUNCH_SECONDS, FASTEST), SLOWEST)


def launch_seconds(
    launch: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the host time of a call after the first: the least of some runs' means."""
    launch()  # compiles and loads it
    each = []
    for _ in range(RUNS):
        began = clock()
        for _ in range(LAUNCHES):
            launch()
        each.append((clock() - began) / LAUNCHES)
    return min(each)
