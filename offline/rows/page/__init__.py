"""A page of rows in a browser, served on loopback to whoever has its address."""
