"""Table, bucket, queues and events: the only place that speaks to AWS."""
