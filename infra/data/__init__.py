"""What outlives every process: bucket, table, queues, events."""
