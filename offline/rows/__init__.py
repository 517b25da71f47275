"""Rows of outputs, compared and shown."""
