"""A local run of a batch file: options, feed of lines, output rows, progress and metrics."""
