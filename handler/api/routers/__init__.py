"""One router a kind of object, and what its objects look like."""
