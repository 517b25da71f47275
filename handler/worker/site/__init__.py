"""Where a worker stands: its settings, its deployment's means, its figures."""
