"""Decisions: questions about an input, each answered by the probabilities of its options."""
