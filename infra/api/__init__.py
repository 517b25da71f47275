"""What answers: the Lambdas and the HTTP API in front of one of them."""
