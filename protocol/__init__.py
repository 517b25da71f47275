"""The OpenAI wire types: bodies, their validation and their errors. Needs pydantic only.

Bodies' fields are defined only here; `batch/file` reads and prints the JSON of lines and rows.
"""
