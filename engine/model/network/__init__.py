"""The decoder's network: layers, attention and recurrence over pages, and its memory."""
