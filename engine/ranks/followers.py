"""Processes of the other ranks, and what is heard of them."""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection

from engine.ranks.messages import Answer, Failed, Pong


class Follower:
    """The process of a rank, and a thread that hears what it answers; `lost` is told of its end."""

    def __init__(
        self, rank: int, environment: Mapping[str, str], lost: Callable[[str], None]
    ) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - a module of ours
                [sys.executable, "-m", "engine.ranks.following", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output may be for rows
                env=environment,
                start_new_session=True,  # Ctrl-C is for the first rank, which decides
            )
        self.rank, self._lost = rank, lost
        self._connection = Connection(ours.detach())
        self.answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()  # None is the end
        self.is_alive = threading.Event()  # set by its answer to `Ping`
        self._thread = threading.Thread(
            target=self._listen, name=f"tidemill-rank-{rank}", daemon=True
        )
        self._thread.start()

    def tell(self, message: memoryview) -> None:
        """Send a message; what has ended is told nothing."""
        with suppress(OSError):
            self._connection.send_bytes(message)

    def kill(self) -> None:
        """End the process; its end is heard of as any other."""
        self._process.kill()

    def close(self) -> None:
        """End the process and wait for that."""
        self._process.kill()
        self._thread.join()
        self._connection.close()

    def _listen(self) -> None:
        words = None
        with suppress(EOFError, OSError):
            while words is None:
                answer = self._connection.recv()
                if isinstance(answer, Failed):
                    words = answer.words
                elif isinstance(answer, Pong):
                    self.is_alive.set()
                else:
                    self.answers.put(answer)
        if words is not None:
            self._process.kill()
        status = self._process.wait()
        if words is None:
            words = f"it was ended by signal {-status}" if status < 0 else f"it exited by {status}"
        self._lost(f"rank {self.rank}: {words}")
        self.answers.put(None)
