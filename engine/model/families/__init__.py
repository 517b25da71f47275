"""Families of decoders: the table of `model_type`, and how each fills the block."""
