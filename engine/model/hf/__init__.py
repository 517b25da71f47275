"""Models of transformers, loaded and run as they are where the engine has no network of its own."""
