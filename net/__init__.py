"""SSRF guard and HTTP client for hosts that a client's url names."""
