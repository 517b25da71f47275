"""Commands for a deployment: preflight, smoke test, stop."""
