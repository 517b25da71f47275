"""Engine processes: the engine in a child process, its wire, and a pool; no model libraries."""
