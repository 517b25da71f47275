"""Models that compute a vector or a score for each sequence in one pass."""
