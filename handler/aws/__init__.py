"""Table, bucket, queues and events: the only package that calls AWS."""
