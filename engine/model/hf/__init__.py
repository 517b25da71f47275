"""Models of transformers, which run unchanged where the engine does not have its own network."""
