"""Tests of work that runs in a thread if it takes long."""

import threading

from tidemill.protocol.in_thread import LONG_BYTES, in_thread_if_long


async def test_only_many_bytes_are_processed_in_a_thread() -> None:
    """A thread per short row would cost more than the row."""
    here = threading.get_ident()
    short, long = bytes(LONG_BYTES), bytes(LONG_BYTES + 1)
    for data, is_here in ((short, True), (long, False)):
        result, thread = await in_thread_if_long(lambda each: (each, threading.get_ident()), data)
        assert result is data
        assert (thread == here) == is_here
