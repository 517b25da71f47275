"""Integrations: the Python API inside other people's distributed engines."""
