"""The model: loaded, proved right, and attended over pages."""
