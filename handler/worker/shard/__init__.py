"""One shard: its message, claim, lease, lines, rows and commit."""
