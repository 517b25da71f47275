"""Commands that are run against a deployment: preflight, smoke test, stop."""
