"""Queries: a batch as it is now, a tenant's statistics, and finished rows by their lines."""
