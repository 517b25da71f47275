"""Storage: the disk cache, and model files on disk or on the Hugging Face hub."""
