"""Ray Data: engines as an actor pool of a Dataset."""
