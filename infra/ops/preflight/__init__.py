"""Checks before a deployment: what would stop it after minutes of work, or leave it idle."""
