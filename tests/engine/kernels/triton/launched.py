"""`python -m tests.engine.kernels.triton.launched`: a kernel launched by a driver of nothing.

As in a container: whoever starts it names the library that stands for the driver's, hides every
compiler, and looks at what was written. What the driver was asked for goes to standard output.
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
    # All that is asked of torch for a card.
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch._C._cuda_getCurrentRawStream = lambda *_: 0
    launch.arch_of = lambda _: "sm_90"
    reason = launch_problem()
    assert reason is None, reason
    run()
