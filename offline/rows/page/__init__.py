"""Web page of rows, served on loopback to clients that know its URL."""
