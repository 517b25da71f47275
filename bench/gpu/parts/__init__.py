"""The parts of `bench.gpu.gpu`: each is a list of tasks that return numbers."""
