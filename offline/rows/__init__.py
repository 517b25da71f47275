"""Rows of outputs: comparison, checks and views."""
