"""CPU kernels, JIT-compiled by numba; each names the torch reference that tests compare it with."""
