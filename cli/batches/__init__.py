"""What the commands about batches share: look at a file, submit it, follow, tell the end."""
