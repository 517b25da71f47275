"""Entry point of `tidemill` and `python -m tidemill`."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os

# Importing `signal` loads enum, re and more, and Ctrl-C would show their traceback.
if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, lambda *_: os._exit(130))

from tidemill.offline.console.signals import end_process, install_early_handlers

# Before anything that takes time to load.
install_early_handlers()


def main() -> None:
    """Run the command and end the process with its exit status."""
    from tidemill.offline.console.terminal import fill_standard_descriptors

    fill_standard_descriptors()
    from .main import main as run

    try:
        status = run()
    except SystemExit as exc:  # argparse, after help or usage
        status = exc.code if isinstance(exc.code, int) else 1
    end_process(status)


if __name__ == "__main__":
    main()
