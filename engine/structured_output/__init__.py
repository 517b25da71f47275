"""Structured outputs: constraints of generated text, as bitmasks of tokens."""
