"""Events in, batches out: everything that runs beside the engine in the cloud."""
