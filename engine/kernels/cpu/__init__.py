"""The CPU's kernels, compiled by numba; each names the torch code that it stands in for."""
