"""The HTTP API, compatible with OpenAI's clients: one router per kind of object."""
