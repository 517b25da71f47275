"""Checkpoints of quantised weights: how they say so, how theirs lie, and how they are read."""
