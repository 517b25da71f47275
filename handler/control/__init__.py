"""Control plane: advances batches by messages, the reaper, the sweep and dead letters."""
