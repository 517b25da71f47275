"""What a model writes, read: its thinking, its calls of tools, its answer."""
