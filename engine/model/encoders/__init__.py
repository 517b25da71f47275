"""Models that give a vector or a score for each sequence, which is read once and as a whole."""
