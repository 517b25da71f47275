"""Where workers run: work queues in, parts out."""
