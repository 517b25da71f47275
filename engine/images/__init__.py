"""Images: bytes of any format into what a model sees."""
