"""Low-rank adapters, read from folders in PEFT's format."""
