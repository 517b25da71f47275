"""Where workers run without machines of one's own: training jobs of SageMaker."""
