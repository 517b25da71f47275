"""Benchmarks: the measurements in docs/explanation/benchmarks.md, one command each."""
