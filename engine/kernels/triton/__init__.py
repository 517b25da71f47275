"""The kernels of NVIDIA GPUs, in Triton; each beside the function in torch that it is held to."""

from __future__ import annotations

from engine.kernels.triton.keeping import keep

keep()
