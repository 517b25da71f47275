"""Checks before a deployment, for problems that would stop it after minutes or leave it idle."""
