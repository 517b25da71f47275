"""Quantised checkpoints: their configs, their layouts, and their loading."""
