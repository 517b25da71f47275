"""The OpenAI wire types: bodies, their validation and their errors. Needs pydantic only.

The fields of bodies are defined here and nowhere else; `batch/file` reads and prints the JSON of
lines and rows.
"""
