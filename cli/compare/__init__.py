"""Comparison of two outputs of rows."""
