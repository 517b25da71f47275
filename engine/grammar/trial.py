"""Grammars tried in a process of their own: one that takes too long to compile ends that alone.

llguidance bounds most of what it does, but not how long it looks for a text that many patterns, or
multiples of large numbers, have in common; and while it looks no other thread of Python's runs.
"""

from __future__ import annotations

import atexit
import re
import signal
import sys
from functools import cache
from subprocess import DEVNULL, PIPE, Popen
from threading import Lock

from llguidance import LLTokenizer

from engine.grammar.compiling import compiled

MAX_SECONDS = 4
"""Of a processor's time, so that it hardly depends on what else runs."""

# What may take long; all other grammars take a time that their length bounds.
_RISKS = re.compile(r"pattern|multipleOf|[&~]")
_SHORT_CHARS = 20_000
_SIZE_BYTES = 8


def compiles_in_time(grammar: str) -> bool:
    """Say whether a grammar is compiled, or found to be wrong, within the seconds that it has."""
    is_tame = len(grammar) <= _SHORT_CHARS and not _RISKS.search(grammar)
    return is_tame or _trial().ends(grammar)


class Trial:
    """A process that compiles one grammar after another; one that was ended is followed by another.

    Each has so many seconds. Safe to use from threads.
    """

    def __init__(self, seconds: float = MAX_SECONDS) -> None:
        self._seconds = seconds
        self._lock = Lock()
        self._process: Popen[bytes] | None = None

    def ends(self, grammar: str) -> bool:
        """Say whether the process is still there once it has compiled a grammar."""
        data = grammar.encode()
        with self._lock:
            if self._process is None:
                command = [sys.executable, "-m", __name__, str(self._seconds)]
                self._process = Popen(  # noqa: S603 - our own command
                    command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL
                )
            told, heard = self._process.stdin, self._process.stdout
            assert told is not None
            assert heard is not None
            try:
                told.write(len(data).to_bytes(_SIZE_BYTES, "big") + data)
                told.flush()
                has_ended = bool(heard.read(1))
            except BrokenPipeError:
                has_ended = False
            if not has_ended:
                self._stop()
            return has_ended

    def close(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def main(seconds: float) -> None:
    """Compile what comes on standard input, and answer each with a byte, or end."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # whoever asks says when it ends
    tokens = LLTokenizer("byte")
    asks, answers = sys.stdin.buffer, sys.stdout.buffer
    while size := asks.read(_SIZE_BYTES):
        grammar = asks.read(int.from_bytes(size, "big")).decode()
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends a process
        compiled(tokens, grammar)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(b".")
        answers.flush()


@cache
def _trial() -> Trial:
    """Return the one of this process."""
    trial = Trial()
    atexit.register(trial.close)
    return trial


if __name__ == "__main__":
    main(float(sys.argv[1]))
