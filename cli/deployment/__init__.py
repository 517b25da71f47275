"""A deployment's resources, reached with the user's AWS credentials."""
