"""The OpenAI wire types: bodies, their validation and their errors. Needs pydantic only.

What fields a body may have is said here and nowhere else; the JSON of lines and rows is read and
printed by `batchfile`.
"""
