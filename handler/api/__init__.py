"""The HTTP API, as OpenAI's clients know it: one router a kind of object."""
