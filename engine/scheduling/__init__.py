"""Scheduling: continuous batching over a paged KV cache with a prefix cache; without tensors."""
