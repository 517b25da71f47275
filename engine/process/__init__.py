"""The engine in a process of its own, and the wire to it. Loads no model library."""
