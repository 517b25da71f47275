"""`python -m engine.ranks.following FD`: a rank that does what the first one tells it to.

It ends when the first does, whatever it does then, and after a word when it fails.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NoReturn

import torch

from engine.ranks.group import TorchGroup
from engine.ranks.messages import Answer, Begin, Done, Failed, Meet, Ping, Pong, Told
from engine.ranks.other import OtherRank
from engine.stepping.graphs import captures_of

_PR_SET_PDEATHSIG = 1


class Following:
    """The process of a rank: one thread takes in what it is told, and so hears of the end."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._answering = threading.Lock()
        self._told: queue.SimpleQueue[Told] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    @torch.inference_mode()
    def run(self) -> None:
        """Do what is told, until this process is ended."""
        begin = self._told.get().message
        assert isinstance(begin, Begin)
        device = torch.device(begin.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        group = TorchGroup(begin.share, device, begin.patience_seconds)
        rank = OtherRank(begin.settings, group, device, captures_of(device))
        while True:
            told = self._told.get()
            if isinstance(told.message, Meet):
                group.meet(told.message.folder)
                self._answer(Done())
            elif (answer := rank.do(told)) is not None:
                self._answer(answer)

    def fail(self, exc: Exception) -> NoReturn:
        """Say what went wrong, and wait for the end: who leads shall know before others feel it."""
        self._answer(Failed.of(exc))
        while True:
            signal.pause()

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                told = self._connection.recv()
                if isinstance(told.message, Ping):
                    self._answer(Pong())
                else:
                    self._told.put(told)
        os._exit(0)  # nobody is there any more, and the main thread may wait for them

    def _answer(self, answer: Answer) -> None:
        with self._answering, suppress(OSError):
            self._connection.send(answer)


def main() -> None:
    """Follow at the end of an inherited socket."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    following = Following(Connection(int(sys.argv[1])))
    try:
        following.run()
    except Exception as exc:  # noqa: BLE001 - whatever it was, the first rank says it
        following.fail(exc)


if __name__ == "__main__":
    main()
