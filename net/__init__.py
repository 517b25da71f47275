"""HTTP client and SSRF guard for the hosts of client URLs, tracing, and retries."""
