"""Calibration of decisions: maps of probabilities, their fit, and the accuracy that results."""
