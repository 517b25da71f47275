"""Loaded by Python at its start where this folder is on PYTHONPATH: waits are short.

openai-batch looks at its batch once a minute and nothing can tell it otherwise.
"""

import time

_LONGEST_SECONDS = 0.2
_sleep = time.sleep


def _sleep_briefly(seconds: float) -> None:
    _sleep(min(seconds, _LONGEST_SECONDS))


time.sleep = _sleep_briefly
