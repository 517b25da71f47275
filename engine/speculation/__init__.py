"""Speculative decoding: drafts from what is written already, which steps of the model verify."""
