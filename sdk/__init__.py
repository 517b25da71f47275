"""Python API: the names that `from tidemill import …` provides."""
