"""Recordings: bytes of any container into samples, samples into what a model hears."""
