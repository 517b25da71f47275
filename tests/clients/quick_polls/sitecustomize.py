"""Loaded by Python at startup if this folder is on PYTHONPATH: it shortens waits.

openai-batch polls its batch once a minute, and has no option to change that.
"""

import time

_LONGEST_SECONDS = 0.2
_sleep = time.sleep


def _sleep_briefly(seconds: float) -> None:
    _sleep(min(seconds, _LONGEST_SECONDS))


time.sleep = _sleep_briefly
