"""Host memory: caches that take no memory until they are written, and weights in huge pages.

numpy requests huge pages from 4 MB on. One of 2 MiB costs a single fault, and the
processor translates its address once: few rows read their weights 10 % faster. The tensors of a
step stay in the heap, which keeps them from step to step (`heap_trim`): huge pages made products of
2,048 rows no faster.

A virtual machine may report its free memory, in blocks of the size of a huge page, to its host,
which takes it back (virtio-balloon). Each new huge page then waits for the host, which takes 2.5
times as long as 512 small pages. There, pages stay small.
"""

from __future__ import annotations

import logging
import math
import mmap
import sys
import weakref
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
# Weights are often smaller than a huge page: they share blocks of memory, which take huge pages
# only as far as they are filled.
BLOCK_BYTES = 2**26
_CACHE_LINE = 64
_VIRTIO_DEVICES = Path("/sys/bus/virtio/devices")
# Of the virtio specification: the id of a balloon, and the bit of its free page reporting.
_BALLOON, _REPORTING_BIT = 5, 5


def reports_free_pages(devices: Path = _VIRTIO_DEVICES) -> bool:
    """Return whether this machine's host takes back free memory, as Linux describes its devices."""
    try:
        for device in devices.iterdir():
            if int((device / "device").read_text(encoding="ascii"), 16) == _BALLOON:
                return (device / "features").read_text(encoding="ascii")[_REPORTING_BIT] == "1"
    except (OSError, ValueError, IndexError):  # not Linux, or hidden in a container
        pass
    return False


@cache
def _is_kept_small() -> bool:
    """Return whether pages stay small on this machine, and log it if so."""
    is_small = sys.platform == "linux" and reports_free_pages()
    if is_small:
        logger.info("no huge pages: this machine's host takes back free memory")
    return is_small


def _untouched_bytes(count: int) -> NDArray[np.uint8]:
    """Return zeros that take no memory until written, in huge pages where those are fast."""
    if not _is_kept_small():
        return np.zeros(count, np.uint8)
    try:
        block = mmap.mmap(-1, count, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as exc:
        raise MemoryError(f"{count:,} bytes could not be allocated: {exc.strerror}") from exc
    # A system may be configured to use huge pages unasked; one without them refuses the advice.
    with suppress(OSError):
        block.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(block, np.uint8)


class WeightBlocks:
    """Blocks of memory for weights, one after the other; a block is freed with its last weight."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self._lock = Lock()
        self._block: weakref.ref[NDArray[np.uint8]] | None = None
        self._num_taken = 0

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor, at the start of a line of the cache."""
        num_bytes = math.prod(shape) * dtype.itemsize
        with self._lock:
            block = None if self._block is None else self._block()
            if block is None or self._num_taken + num_bytes > len(block):
                block = _untouched_bytes(max(num_bytes, self._block_bytes) + _CACHE_LINE)
                self._block = weakref.ref(block)
                self._num_taken = -block.ctypes.data % _CACHE_LINE
            start = self._num_taken
            self._num_taken += -(-num_bytes // _CACHE_LINE) * _CACHE_LINE
        return torch.from_numpy(block[start : start + num_bytes]).view(dtype).view(shape)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """Allocate zeros that take no memory on a CPU until written.

    Zeros, not garbage: kernels weight unwritten slots by zero, which a NaN would survive.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros would write them all.
    return torch.from_numpy(_untouched_bytes(num_bytes)).view(dtype).view(shape)
