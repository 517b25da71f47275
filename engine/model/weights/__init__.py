"""Weights: where they lie in a checkpoint, and how they get onto a device."""
