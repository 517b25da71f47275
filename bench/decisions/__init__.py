"""Benchmarks of decisions."""
