"""The parts of `bench.gpu.gpu`: each a list of tasks, which give numbers."""
