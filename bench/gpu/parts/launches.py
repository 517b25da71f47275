"""Host time of a launch, taken apart: our function, Triton's call, its C launcher, the driver."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from bench.gpu.parts.task import Numbers, Place, Task
from tidemill.engine.kernels.backends import choose_elementwise
from tidemill.engine.loop.launch_cost import LAUNCH_SECONDS, LAYER_SECONDS, layer_seconds

LAUNCHES = 300
WIDTH = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _add(x, y, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803 - Triton 3.6 reads annotations
    places = tl.arange(0, BLOCK)
    is_place = places < count
    total = tl.load(x + places, is_place) + tl.load(y + places, is_place)
    tl.store(out + places, total, is_place)


def tasks(place: Place) -> Iterator[Task]:
    """Yield the calls from the outside in."""
    yield Task("a norm, our function", partial(norm, place), 1)
    yield Task("an operator of torch's", partial(operator, place), 1)
    yield Task("Triton's call", partial(jit, place), 2)
    yield Task("C launcher and driver", partial(c_launcher, place), 1)
    yield Task("driver: one graph of a kernel", partial(driver, place), 1)
    yield Task("a layer, as measured at load", partial(layer, place), 1)


def host_seconds(place: Place, call: Callable[[], object]) -> Numbers:
    """Return the host time of a call, while the device keeps up."""
    call()
    place.wait()
    count = 2 if place.is_tiny else LAUNCHES
    started = time.perf_counter()
    for _ in range(count):
        call()
    seconds = (time.perf_counter() - started) / count
    place.wait()
    return {"host_seconds": seconds}


def norm(place: Place) -> Numbers:
    """Measure the function that a layer calls, with its output's allocation."""
    row = torch.ones(1, WIDTH, dtype=place.dtype, device=place.device)
    blocks = choose_elementwise(place.dtype, place.device)
    weight = blocks.norm_weight(row[0], 0.0)
    return host_seconds(place, lambda: blocks.rms_norm(row, weight, 1e-6))


def operator(place: Place) -> Numbers:
    """Measure an operator without an allocation."""
    row = torch.ones(1, WIDTH, dtype=place.dtype, device=place.device)
    return host_seconds(place, lambda: row.add_(1))


def _operands(place: Place) -> tuple[Any, ...]:
    x, y, out = torch.ones(3, WIDTH, dtype=place.dtype, device=place.device)
    return x, y, out, WIDTH


def jit(place: Place) -> Numbers:
    """Measure a launch through Triton: it binds arguments, and looks the kernel up."""
    operands = _operands(place)
    return host_seconds(place, lambda: _add[(1,)](*operands, BLOCK=WIDTH))


def c_launcher(place: Place) -> Numbers:
    """Measure a launch of a compiled kernel, without a lookup."""
    if place.is_tiny:
        return {"skipped": "interpreted kernels have none"}
    operands = _operands(place)
    compiled = _add[(1,)](*operands, BLOCK=WIDTH)
    run = compiled[(1, 1, 1)]
    return host_seconds(place, lambda: run(*operands, WIDTH))


def driver(place: Place) -> Numbers:
    """Measure a replay of one kernel, which is one call of the driver's."""
    if place.is_tiny:
        return {"skipped": "no GPU"}
    operands = _operands(place)
    graph = place.captured(lambda: _add[(1,)](*operands, BLOCK=WIDTH))
    return host_seconds(place, graph.replay)


def layer(place: Place) -> Numbers:
    """Return the cost that sets the end of the graphs."""
    seconds = layer_seconds(place.device)
    return {
        "host_seconds": seconds,
        "times_assumed": seconds / LAYER_SECONDS,
        "launch_seconds": LAUNCH_SECONDS * seconds / LAYER_SECONDS,
    }
