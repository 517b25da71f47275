"""The emulator of a local cloud: at one address as long as that lives, and started again there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from types import TracebackType
from typing import Self

from localstack.guard import Guard
from localstack.ministack import (
    STOP_SECONDS,
    check_free,
    find_ministack,
    ministack_environment,
    on_a_free_port,
    running_server,
)
from localstack.state import State

_KEEPER = Path(__file__).with_name("keeper.py")
_KEEP_STATE_SECONDS = 30
MAX_TRIES = 5
# What has worked for so long starts anew with its tries.
_STEADY_SECONDS = 120.0


@dataclass(slots=True)
class Tries:
    """How often in a row something has ended; it is started again later each time."""

    started_at: float
    num_ended: int = 0
    start_at: float | None = None

    def seconds_to_next(self, now: float) -> float | None:
        """Take note of an end; return how long to wait before the next start, None for none."""
        if now - self.started_at >= _STEADY_SECONDS:
            self.num_ended = 0
        self.num_ended += 1
        if self.num_ended > MAX_TRIES:
            return None
        seconds = 2.0 ** (self.num_ended - 1)
        self.start_at = now + seconds
        return seconds

    def is_due(self, now: float) -> bool:
        """Say whether it is time for the next start, and take note of that start."""
        if self.start_at is None or now < self.start_at:
            return False
        self.started_at, self.start_at = now, None
        return True


@dataclass(slots=True)
class Silence:
    """For how long an emulator that runs has not answered."""

    since: float | None = None

    def seconds(self, now: float) -> float:
        """Take note that it has not answered; return for how long."""
        if self.since is None:
            self.since = now
        return now - self.since

    def end(self) -> None:
        """Take note that it has answered."""
        self.since = None


class LocalEmulator:
    """MiniStack as a context manager; what is in it is gone when it ends, unless it has `state`."""

    def __init__(self, folder: Path, guard: Guard, port: int | None, state: State | None) -> None:
        self._folder = folder
        self._guard = guard
        self._port = port if state is None else state.port
        self._state = state
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def process(self) -> Popen[bytes]:
        """Return the server's process, which may have ended."""
        return self._process

    @property
    def endpoint_url(self) -> str:
        """Return its address, which stays."""
        return f"http://127.0.0.1:{self._port}"

    def restart(self) -> None:
        """Start one that has ended again, where it was and with what its state holds."""
        self._stack.close()
        self._start()

    def _start(self) -> None:
        entering = on_a_free_port(self._at) if self._port is None else self._at(self._port)
        self._process, self._port = self._stack.enter_context(entering)

    @contextmanager
    def _at(self, port: int) -> Iterator[tuple[Popen[bytes], int]]:
        check_free(port)
        endpoint_url = f"http://127.0.0.1:{port}"
        environment = ministack_environment(endpoint_url, self._folder)
        command, stop_seconds, lock = [str(find_ministack())], STOP_SECONDS, None
        if self._state is not None:
            kept = self._state.folder
            environment |= {
                "PERSIST_STATE": "1",
                "STATE_DIR": str(kept),
                "S3_PERSIST": "1",
                "S3_DATA_DIR": str(kept / "s3"),
            }
            # -P: its own folder has another `ministack`.
            command = [str(find_ministack().resolve().with_name("python")), "-P", str(_KEEPER)]
            stop_seconds, lock = _KEEP_STATE_SECONDS, self._state.lock
        with running_server(
            command,
            endpoint_url,
            environment,
            self._folder,
            stop_seconds=stop_seconds,
            guard=self._guard,
            lock=lock,
        ) as process:
            yield process, port
