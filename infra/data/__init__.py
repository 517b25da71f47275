"""The Data stack: bucket, table, queues and events, which outlive every process."""
