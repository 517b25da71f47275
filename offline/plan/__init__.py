"""Plan of a file: an index of its lines, the order to run them in, and forecasts."""
