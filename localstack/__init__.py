"""The whole cloud on one machine, without an account."""
