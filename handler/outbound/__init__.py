"""Out to hosts of clients: which may be dialled, what is sent there, and a webhook's tries."""
