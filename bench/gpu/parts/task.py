"""Tasks of a part of `bench.gpu.gpu`, and the context that they share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from bench.gpu.cards import CARDS, Card

Numbers = dict[str, Any]
# Bytes written before each timed call to clear caches: more than any card's cache.
FLUSHED_BYTES = 256 * 2**20
WARM_CALLS = 3


class Task(NamedTuple):
    """A task: its name, which is unique in its part, its call, and its usual seconds."""

    name: str
    call: Callable[[], Numbers]
    seconds: float = 5.0


@dataclass(frozen=True, slots=True)
class Place:
    """The device: a GPU, or with `is_tiny` a CPU that interprets kernels on tiny shapes.

    `found` are the results of earlier parts, by part and name; `until` is the end of this part's
    time, by the monotonic clock.
    """

    device: torch.device
    is_tiny: bool
    found: Mapping[str, Mapping[str, Numbers]]
    until: float = float("inf")

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Return the dtypes of accuracy checks; the interpreter does not support bfloat16."""
        if self.is_tiny:
            return (torch.float32,)
        return (torch.bfloat16,)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of timed runs."""
        return torch.float32 if self.is_tiny else torch.bfloat16

    @property
    def card(self) -> Card:
        """Return the card: its reported memory and its measured ceilings."""
        like = CARDS["h200"]
        if not self.is_tiny:
            found = torch.cuda.get_device_properties(self.device)
            like = replace(card_like(found.name, found.total_memory), memory=found.total_memory)
        ceilings = self.found.get("ceilings", {})
        copy = ceilings.get("copy", {}).get("bytes_per_second", like.bandwidth)
        flops = ceilings.get("product", {}).get("flops_per_second", like.flops)
        return like.reaching(copy, flops)

    def wait(self) -> None:
        """Return once the device has finished all its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], object], runs: int = 20) -> float:
        """Return the median time of a call on the device, with cold caches, after a first call."""
        if self.is_tiny:
            return self._wall_seconds(call, 1)
        for _ in range(WARM_CALLS):
            call()
        flush = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device=self.device)
        make: Any = partial(torch.cuda.Event, enable_timing=True)
        events = [(make(), make()) for _ in range(runs)]
        for begin, end in events:
            flush.zero_()
            begin.record()
            call()
            end.record()
        self.wait()
        return statistics.median(float(begin.elapsed_time(end)) / 1e3 for begin, end in events)

    def replay_seconds(self, call: Callable[[], object], runs: int = 20) -> float:
        """Return the same for a CUDA graph of the call, where launches cost no host time."""
        if self.is_tiny:
            return self._wall_seconds(call, 1)
        return self.seconds(self.captured(call).replay, runs)

    def captured(self, call: Callable[[], object], times: int = 1) -> torch.cuda.CUDAGraph:
        """Return a graph of a number of calls, which were made before."""
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(WARM_CALLS):
                call()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for _ in range(times):
                    call()
        finally:
            torch.cuda.set_stream(current)  # a failed capture does not restore it
        return graph

    def _wall_seconds(self, call: Callable[[], object], runs: int) -> float:
        call()
        started = time.perf_counter()
        for _ in range(runs):
            call()
        self.wait()
        return (time.perf_counter() - started) / runs


def card_like(name: str, memory: float) -> Card:
    """Return the card with a driver's name, else the one with the most similar memory."""
    if named := [card for card in CARDS.values() if card.name in name.lower()]:
        return max(named, key=lambda card: len(card.name))
    return min(CARDS.values(), key=lambda card: abs(card.memory - memory))
