"""Estimate of a file before anything runs."""
