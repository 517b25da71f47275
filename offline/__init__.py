"""Files and tables through engines on this machine, as `tidemill run` and Python run them."""
