"""The engine of a command: its options, weights, processes and replicas."""
