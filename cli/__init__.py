"""Command line interface: the `tidemill` command."""
