"""A profile of some steps: the device busy, the host waiting, each kernel."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

from torch.profiler import DeviceType, ProfilerActivity, profile

from bench.gpu.parts.task import Numbers, Place

# Calls that block the host until the device is done.
WAITS = ("cudaEventSynchronize", "cudaStreamSynchronize", "cudaDeviceSynchronize")
LONGEST = 25


def profiled(place: Place, step: Callable[[], object], steps: int) -> Numbers:
    """Return the distribution of time over some steps."""
    activities = [ProfilerActivity.CPU]
    if place.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    place.wait()
    with profile(activities=activities, acc_events=True) as trace:
        started = time.perf_counter()
        for _ in range(steps):
            step()
        seconds = time.perf_counter() - started
        place.wait()
    on_device: dict[str, float] = defaultdict(float)
    spans, waited = [], 0.0
    for event in trace.events():
        span = event.time_range
        if event.device_type == DeviceType.CUDA:
            spans.append((span.start, span.end))
            on_device[event.name[:80]] += (span.end - span.start) / 1e6 / steps
        elif event.name in WAITS:
            waited += (span.end - span.start) / 1e6
    longest = sorted(on_device.items(), key=lambda item: -item[1])[:LONGEST]
    return {
        "step_seconds": seconds / steps,
        "device_busy": covered(spans) / 1e6 / seconds,
        "host_waits": waited / seconds,
        "kernels_a_step": len(spans) / steps,
        "kernel_seconds_a_step": dict(longest),
    }


def covered(spans: list[tuple[float, float]]) -> float:
    """Return how long at least one of some spans lasts."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
