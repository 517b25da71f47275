"""Benchmarks of the HTTP server: streams, mixed load, soak."""
