"""Kernels: attention, linear layers, norms, experts and sampling, on plain tensors.

The torch versions are the reference and run on every device. Faster versions are in the folders for
CPUs (`cpu`: numba) and GPUs (`triton`), and tests compare these with the reference.
"""
