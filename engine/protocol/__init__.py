"""The OpenAI wire types, and the line and row formats of batch files.

Nothing else in the project parses or prints the JSON of requests. Needs pydantic only.
"""
