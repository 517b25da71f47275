"""From an uploaded file to shards on the work queue."""
