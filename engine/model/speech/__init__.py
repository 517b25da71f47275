"""Models that transcribe recordings: an audio encoder and a text decoder."""
