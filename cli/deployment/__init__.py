"""A deployment's table and bucket, for whoever has AWS credentials for it."""
