"""Processes of the other ranks, each with a thread that reads its answers."""

from __future__ import annotations

import queue
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection

from ..child_command import module_command
from .messages import Answer, Failed, Pong


class RankProcess:
    """The process of a rank, and a thread that reads its answers; `lost` is called at its end."""

    def __init__(
        self, rank: int, environment: Mapping[str, str], lost: Callable[[Failed], None]
    ) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - a module of this package
                module_command("tidemill.engine.parallel.rank_main", str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output may contain rows
                env=environment,
                start_new_session=True,  # Ctrl-C goes only to the first rank, which decides
            )
        self.rank, self._lost = rank, lost
        self._connection = Connection(ours.detach())
        self.answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()  # None is the end
        self.is_alive = threading.Event()  # set by its answer to `Ping`
        self._thread = threading.Thread(
            target=self._listen, name=f"tidemill-rank-{rank}", daemon=True
        )
        self._thread.start()

    def send(self, message: memoryview) -> None:
        """Send a message; do nothing if the process has ended."""
        with suppress(OSError):
            self._connection.send_bytes(message)

    def kill(self) -> None:
        """End the process; `lost` is called as for any other end."""
        self._process.kill()

    def close(self) -> None:
        """End the process and wait for its end."""
        self._process.kill()
        self._thread.join()
        self._connection.close()

    def _listen(self) -> None:
        end = None
        with suppress(EOFError, OSError):
            while end is None:
                answer = self._connection.recv()
                if isinstance(answer, Failed):
                    end = answer
                elif isinstance(answer, Pong):
                    self.is_alive.set()
                else:
                    self.answers.put(answer)
        if end is None:
            status = self._process.wait()
            by = f"was ended by signal {-status}" if status < 0 else f"exited with status {status}"
            end = Failed(f"it {by}")
        self._lost(end._replace(words=f"rank {self.rank}: {end.words}"))
        self.answers.put(None)
        self.kill()
        self._process.wait()
