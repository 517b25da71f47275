"""Kubernetes: workers as Jobs, started by a loop inside the cluster."""
