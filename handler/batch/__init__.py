"""What a batch is and how it moves: values and pure functions, no I/O."""
