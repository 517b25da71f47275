"""Resumable uploads of input files and downloads of results."""
