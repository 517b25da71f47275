"""Command in a child process, which ends with its parent: standard input is then closed."""

from __future__ import annotations

import os
import signal
import sys
import threading

from tidemill.cli.__main__ import main


def end_with_parent() -> None:
    """Wait until standard input is closed, which means the parent is gone, and stop the command."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    sys.argv[0] = "tidemill"
    main()
