"""Batch files: lines in, rows out, and what ids repeat. Needs pydantic only.

Nothing else in the project reads the lines or prints the rows of a file.
"""
