"""Kernels are interpreted where no GPU is: Triton is told before it sees the first of them."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
