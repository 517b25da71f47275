"""The Api stack: the Lambdas, and the HTTP API in front of one of them."""
