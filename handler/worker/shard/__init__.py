"""One shard: rung for, claimed, run line by line, kept under its lease, committed."""
