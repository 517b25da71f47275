"""Files of a run: sources of lines, their formats and checks, and outputs for rows."""
