"""Weights: their locations in a checkpoint, and loading onto a device."""
