"""Workers as SageMaker training jobs, without instances in the account."""
