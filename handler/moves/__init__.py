"""One step of a batch, by whoever takes it: its turn, a word to the world, cancelling, the end."""
