"""Engine process: the engine in a child process, and the wire to it. Loads no model library."""
