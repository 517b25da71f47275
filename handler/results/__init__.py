"""Finished rows of a batch by their lines, from its durable parts, while it runs and after."""
