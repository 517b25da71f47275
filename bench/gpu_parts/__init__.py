"""The parts of `bench.gpu`: each a list of tasks, which give numbers."""
