"""Hosts of an engine that tests start in their own process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tidemill.sdk.integrations.engine_host import EngineHost
from tidemill.sdk.integrations.sockets import listen


@contextmanager
def accepting_host(process: Any, address: str) -> Iterator[EngineHost]:
    """Yield a host that accepts connections; its threads end with the block."""
    with listen(address) as listener:
        host = EngineHost(process)
        accepting = threading.Thread(target=host.accept_all, args=(listener,), daemon=True)
        accepting.start()
        try:
            yield host
        finally:
            host.end("its test is over")
            host.close()
            # A thread that waits for a connection does not notice that the socket is closed.
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()
            Path(address).unlink()
