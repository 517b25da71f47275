"""Host memory: caches that take no memory until they are written, and weights in huge pages.

numpy requests huge pages from 4 MB on. One of 2 MiB costs a single fault, and the
processor translates its address once: few rows read their weights 10 % faster. The tensors of a
step stay in the heap, which keeps them from step to step (`heap_trim`): huge pages made products of
2,048 rows no faster.
"""

from __future__ import annotations

import math
import weakref
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CPU = torch.device("cpu")
# Weights are often smaller than a huge page: they share blocks of memory, which take huge pages
# only as far as they are filled.
BLOCK_BYTES = 2**26
_CACHE_LINE = 64


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
                block = np.empty(max(num_bytes, self._block_bytes) + _CACHE_LINE, np.uint8)
                self._block = weakref.ref(block)
                self._num_taken = -block.ctypes.data % _CACHE_LINE
            start = self._num_taken
            self._num_taken += -(-num_bytes // _CACHE_LINE) * _CACHE_LINE
        return torch.from_numpy(block[start : start + num_bytes]).view(dtype).view(shape)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """Allocate zeros that take no memory on a CPU until written.

    Zeros, not garbage: kernels weight unwritten slots by zero, which a NaN would survive.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy requests zeroed pages from the system, while torch.zeros would write them all.
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
