"""`python -m tidemill.engine.parallel.rank_main FD`: a rank that follows the first one.

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

from .messages import Answer, Command, Done, Failed, Init, InitProcessGroup, Ping, Pong
from .process_group import TorchGroup
from .rank import Rank

_PR_SET_PDEATHSIG = 1


class RankWorker:
    """The process of a rank: one thread takes in what it is told, and so hears of the end."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._answering = threading.Lock()
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    @torch.inference_mode()
    def run(self) -> None:
        """Do what is told, until this process is ended."""
        begin = self._commands.get().message
        assert isinstance(begin, Init)
        device = torch.device(begin.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        group = TorchGroup(begin.shard, device, begin.patience_seconds)
        rank = Rank(begin.settings, group, device)
        while True:
            command = self._commands.get()
            if isinstance(command.message, InitProcessGroup):
                group.connect(command.message.folder)
                self._answer(Done())
            elif (answer := rank.execute(command)) is not None:
                self._answer(answer)

    def fail(self, exc: Exception) -> NoReturn:
        """Say what went wrong, and wait for the end: who leads shall know before others feel it."""
        self._answer(Failed.from_exception(exc))
        while True:
            signal.pause()

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                command = self._connection.recv()
                if isinstance(command.message, Ping):
                    self._answer(Pong())
                else:
                    self._commands.put(command)
        os._exit(0)  # nobody is there any more, and the main thread may wait for them

    def _answer(self, answer: Answer) -> None:
        with self._answering, suppress(OSError):
            self._connection.send(answer)


def main() -> None:
    """Follow at the end of an inherited socket."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    worker = RankWorker(Connection(int(sys.argv[1])))
    try:
        worker.run()
    except Exception as exc:  # noqa: BLE001 - whatever it was, the first rank says it
        worker.fail(exc)


if __name__ == "__main__":
    main()
