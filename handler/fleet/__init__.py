"""Fleets of workers: scaled by demand, to zero without work, with a circuit breaker."""
