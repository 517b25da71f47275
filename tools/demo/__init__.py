"""Generators of the recordings in `examples/` and of the demo reranker."""
