"""Weights: their places in a checkpoint, and loading onto a device."""
