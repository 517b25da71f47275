"""One run of a file on this machine: its options, lines in, rows out, what is told."""
