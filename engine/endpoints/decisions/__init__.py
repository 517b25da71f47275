"""Decisions: the endpoints, and a reader for each kind of model."""
