"""Benchmarks of parts on one machine: kernels, sampling, scheduling, grammars."""
