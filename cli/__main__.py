"""Entry point of `tidemill` and `python -m tidemill`."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os
import sys

# Importing `signal` loads enum, re and more, and Ctrl-C would show their traceback.
if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, lambda *_: os._exit(130))

from tidemill.offline.console.signals import end_process, install_early_handlers

# Before anything that takes time to load.
install_early_handlers()


def main() -> None:
    """Run the command and end the process with its exit status."""
    from .main import main as run

    if sys.stderr is None:  # closed by the parent: messages are discarded
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - until the end
    try:
        status = run()
    except SystemExit as exc:  # argparse, after help or usage
        status = exc.code if isinstance(exc.code, int) else 1
    end_process(status)


if __name__ == "__main__":
    main()
