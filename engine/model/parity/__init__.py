"""Parity: the engine's logits against those of transformers."""
