"""`python -m cli` is `tidemill`, and this is where both begin and end."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os
import sys

# `signal` loads enum, re and more: Ctrl-C would show a traceback of those.
if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, lambda *_: os._exit(130))

from cli.signals import hear_from_the_start, leave

# Before anything that takes time to load.
hear_from_the_start()


def main() -> None:
    """Run what was typed and end the process with its exit status."""
    from cli.main import main as run

    if sys.stderr is None:  # closed by whoever started us; what is said is said to nobody
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - until the end
    try:
        status = run()
    except SystemExit as exc:  # argparse, after help or usage
        status = exc.code if isinstance(exc.code, int) else 1
    leave(status)


if __name__ == "__main__":
    main()
