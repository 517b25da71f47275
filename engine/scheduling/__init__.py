"""Which sequences run, on which pages, and what the next step computes; no tensors."""
