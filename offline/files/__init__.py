"""The files of a run: where lines come from, what they must be, and where rows go."""
