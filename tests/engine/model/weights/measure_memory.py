"""`python measure_memory.py FOLDER`: prints the memory that reading a model's weights takes.

A line for each case: dtype, whether buffers are staged, bytes of the peak, of the weights and of
the largest file.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from tidemill.engine.model.config.hf_config import read_hf_config
from tidemill.engine.model.families.registry import architecture_of
from tidemill.engine.model.weights import weights as module
from tidemill.engine.model.weights.checkpoint import find_checkpoint
from tidemill.engine.model.weights.staging import Staging
from tidemill.engine.model.weights.weights import read_weights


def copy(to: Tensor, buffer: Tensor) -> Callable[[], None]:
    """Copy a buffer to a device, which the host plays."""
    to.copy_(buffer)
    return lambda: None


def measure(folder: str, name: str, *, is_staged: bool) -> None:
    """Read the weights in a dtype, and print the memory."""
    if is_staged:
        first, second = (torch.empty(10**6, dtype=torch.uint8) for _ in range(2))
        module.staging_for = lambda _: Staging(copy, (first, second))  # type: ignore[assignment]
    hf_config = read_hf_config(folder)
    checkpoint = find_checkpoint(folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    architecture, dtype = architecture_of(hf_config), getattr(torch, name)
    weights = read_weights(checkpoint, architecture, dtype, torch.device("cpu"))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    held = sum(tensor.nbytes for tensor in weights.values())
    largest = max(path.stat().st_size for path in checkpoint.files)
    print(name, is_staged, (after - before) * 1024, held, largest, flush=True)  # noqa: T201


if __name__ == "__main__":
    # Each is a process with separate memory; the libraries are imported once.
    for case_name, is_case_staged in (("bfloat16", False), ("float32", False), ("bfloat16", True)):
        if not os.fork():
            measure(sys.argv[1], case_name, is_staged=is_case_staged)
            os._exit(0)
        os.wait()
