"""Adapters of low rank, read from the folders that PEFT writes."""
