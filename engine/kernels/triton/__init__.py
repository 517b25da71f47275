"""Triton kernels for NVIDIA GPUs; each names the torch reference that tests compare it with."""

from __future__ import annotations

from .compile_cache import install

install()
