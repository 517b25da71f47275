"""Batch files: reading lines, printing rows, finding repeated IDs. Needs only pydantic.

Nothing else in the project reads the lines or prints the rows of a file.
"""
