"""The recordings of `examples/`, and the training of the demo reranker."""
