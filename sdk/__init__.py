"""Python API: what `from tidemill import …` gives."""
