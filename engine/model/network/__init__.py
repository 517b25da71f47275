"""The decoder's network: layers, paged attention and recurrence, and its memory."""
