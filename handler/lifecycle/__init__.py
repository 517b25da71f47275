"""Lifecycle of a batch: its lock, announcements, cancellation and end."""
