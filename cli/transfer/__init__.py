"""A file to the server, results from it: bytes on their way, that go on after a cut."""
