"""Speculative decoding: drafts from existing text, verified by steps of the model."""
