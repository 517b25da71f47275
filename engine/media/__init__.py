"""Media: recordings and images, decoded and prepared for models."""
