"""`python -m tidemill.engine.parallel.rank_main FD`: a rank that follows the first one.

It ends together with the first rank, at any time; after a failure it sends a message first.
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
    """The process of a rank: one thread receives commands, and so notices the leader's end."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._answering = threading.Lock()
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    @torch.inference_mode()
    def run(self) -> None:
        """Execute commands until this process is ended."""
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
        """Report a failure and wait for the end, so that the leader learns the cause first."""
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
        os._exit(0)  # the leader is gone, and the main thread may wait for it

    def _answer(self, answer: Answer) -> None:
        with self._answering, suppress(OSError):
            self._connection.send(answer)


def main() -> None:
    """Run a rank that gets its commands from an inherited socket."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    worker = RankWorker(Connection(int(sys.argv[1])))
    try:
        worker.run()
    except Exception as exc:  # noqa: BLE001 - the first rank reports any failure
        worker.fail(exc)


if __name__ == "__main__":
    main()
