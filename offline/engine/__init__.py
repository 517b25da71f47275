"""The engine that a command has: what can be asked of it, its weights, its process."""
