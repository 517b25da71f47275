"""Benchmarks: what is measured for docs/explanation/benchmarks.md, one command each."""
