"""`python -m tests.engine.kernels.triton.launched`: launches a kernel with a stub of the driver.

The environment is like a container: the caller names the library that replaces the driver's, hides
every compiler, and reads the written files. The driver's calls go to standard output.
"""

from __future__ import annotations

import torch

from tidemill.engine.kernels.triton import elementwise, launch
from tidemill.engine.kernels.triton.driver import launch_problem

# Of Qwen3-0.6B, whose kernels an image has.
HIDDEN = 1024


def run() -> None:
    """Launch a norm."""
    x = torch.zeros(2, HIDDEN, dtype=torch.bfloat16)
    elementwise.rms_norm(x, x[0], 1e-6)


if __name__ == "__main__":
    # The functions of torch that a card needs.
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch._C._cuda_getCurrentRawStream = lambda *_: 0
    launch.arch_of = lambda _: "sm_90"
    reason = launch_problem()
    assert reason is None, reason
    run()
    launch.JITFunction.run = None  # later launches do not need Triton's own call
    run()
