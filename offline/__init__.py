"""Local runs: files and tables through engines on this machine, for `tidemill run` and Python."""
