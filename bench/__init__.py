"""Benchmarks: what is measured for docs/performance.md, one command each."""
