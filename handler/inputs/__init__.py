"""Inputs of batches as requests, and their published rows, as streams."""
