"""Double-buffered copies of file bytes to a device, through pinned memory of the host.

While one buffer is copied, the other is filled, so that the host does not need memory for the whole
model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Large enough to hide a copy's fixed cost: 64 MB take some milliseconds.
BUFFER_BYTES = 2**26

# Waits until a copy is finished.
Waits = Callable[[], None]


class Staging:
    """Two buffers of memory that a device reads while the host continues."""

    def __init__(
        self, copy: Callable[[Tensor, Tensor], Waits], buffers: tuple[Tensor, Tensor]
    ) -> None:
        """Allocate buffers, and use `copy(to, from)`, which returns a wait for its completion."""
        self._copy = copy
        self._buffers = list(buffers)
        self._is_free: list[Waits] = [_at_once, _at_once]

    def send(self, read: Callable[[memoryview], None], target: Tensor) -> None:
        """Fill `target`, contiguous, with bytes: `read` fills a buffer with the next ones.

        Later work on the device sees it filled.
        """
        for part in torch.split(target.view(-1).view(torch.uint8), len(self._buffers[0])):
            buffer, is_free = self._buffers.pop(0), self._is_free.pop(0)
            is_free()
            fill_weights = buffer[: len(part)]
            numbers: Any = fill_weights.numpy()
            read(memoryview(numbers))
            self._is_free.append(self._copy(part, fill_weights))
            self._buffers.append(buffer)


def staging_for(device: torch.device) -> Staging | None:
    """Return the copier to a device; None if bytes are read directly to their places."""
    if device.type != "cuda":
        return None

    def copy(to: Tensor, buffer: Tensor) -> Waits:
        to.copy_(buffer, non_blocking=True)
        is_there = torch.cuda.current_stream(device).record_event()
        wait: Waits = is_there.synchronize
        return wait

    first, second = (torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in "ab")
    return Staging(copy, (first, second))


def _at_once() -> None:
    """Wait for nothing."""
