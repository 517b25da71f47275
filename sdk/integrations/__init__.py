"""Integrations of the Python API with distributed engines: Ray, Daft and Spark."""
