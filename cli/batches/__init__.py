"""What the commands about batches share: look at a file, upload it, follow, fetch, tell the end."""
