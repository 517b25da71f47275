"""Context of a worker: its configuration, its deployment, and its metrics."""
