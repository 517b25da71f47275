"""State of sequences: page pool, page groups and rows, by group of layers; without tensors."""
