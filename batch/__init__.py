"""Batch values and their state transitions: pure functions, no I/O."""
