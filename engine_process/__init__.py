"""Engine process: the engine in a child process, and the wire to it; without model libraries."""
