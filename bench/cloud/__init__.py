"""Benchmarks of batches through an emulated cloud."""
