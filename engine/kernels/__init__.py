"""Kernels: attention, linear layers, norms, experts and sampling, on plain tensors.

The torch versions are the reference and run on every device. Faster versions lie beside them, for
CPUs (`cpu`: numba) and GPUs (`triton`), and tests hold these to the reference.
"""
