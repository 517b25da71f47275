"""One file a command: its flags, and what happens when it is typed."""
