"""Console: errors with exit statuses, signals, terminal output, tables and spinners."""
