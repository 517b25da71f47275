"""What the output of a request must be, as masks of tokens."""
