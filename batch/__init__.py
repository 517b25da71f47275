"""Batch values and their state moves: pure functions, no I/O."""
