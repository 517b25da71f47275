"""HTTP client and SSRF guard for client URLs, tracing, and retries."""
