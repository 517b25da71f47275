"""Tensor parallel: one model on many devices, each with a process of its own."""
