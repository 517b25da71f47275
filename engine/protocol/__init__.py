"""The OpenAI wire types: bodies, their validation and their errors. Needs pydantic only.

Nothing else in the project parses or prints the JSON of requests.
"""
