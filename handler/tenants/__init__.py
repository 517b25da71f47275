"""Who may: keys of the API, tenants and their limits."""
