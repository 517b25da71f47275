"""Model weights from S3 to this machine's disk."""
