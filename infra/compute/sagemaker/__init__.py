"""Workers as SageMaker training jobs, without instances of one's own."""
