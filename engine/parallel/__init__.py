"""Tensor parallel: one model on many devices, each with its own process."""
