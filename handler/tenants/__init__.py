"""Tenants: API keys and limits."""
