"""The emulator of a local cloud, restarted at the same address."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from types import TracebackType
from typing import Self

from localstack.ministack import (
    STOP_SECONDS,
    check_free,
    find_ministack,
    ministack_environment,
    running_server,
    with_free_port,
)
from localstack.state_folder import StateFolder
from localstack.watchdog import Watchdog
from tidemill.net.backoff import exponential_delay

_MINISTACK_SNAPSHOTS = Path(__file__).with_name("ministack_snapshots.py")
_KEEP_STATE_SECONDS = 30
MAX_RESTARTS = 5
# A run of this length resets the backoff.
_STEADY_SECONDS = 120.0


@dataclass(slots=True)
class RestartBackoff:
    """Exponential backoff between restarts; a long run without a failure resets it."""

    started_at: float
    num_failures: int = 0

    def next_delay(self, now: float) -> float | None:
        """Record a failure; return the seconds until the next restart, None after the last."""
        if now - self.started_at >= _STEADY_SECONDS:
            self.num_failures = 0
        self.num_failures += 1
        if self.num_failures > MAX_RESTARTS:
            return None
        return exponential_delay(self.num_failures - 1, 1.0)

    def record_start(self, now: float) -> None:
        """Record a restart."""
        self.started_at = now


@dataclass(slots=True)
class Outage:
    """The time since a running emulator first failed to reply."""

    since: float | None = None

    def record_failure(self, now: float) -> float:
        """Record a missing reply; return the seconds since the first one."""
        if self.since is None:
            self.since = now
        return now - self.since

    def end(self) -> None:
        """Record a reply."""
        self.since = None


class LocalEmulator:
    """MiniStack as a context manager; its content is lost when it ends, unless it has `state`."""

    def __init__(
        self, folder: Path, watchdog: Watchdog, port: int | None, state: StateFolder | None
    ) -> None:
        self._folder = folder
        self._watchdog = watchdog
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
        """Return its address, which does not change."""
        return f"http://127.0.0.1:{self._port}"

    def restart(self) -> None:
        """Restart an emulator that has ended, at its address and from its persisted state."""
        self._stack.close()
        self._start()

    def _start(self) -> None:
        entering = with_free_port(self._at) if self._port is None else self._at(self._port)
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
            # -P: its own folder contains another `ministack`.
            python = find_ministack().resolve().with_name("python")
            command = [str(python), "-P", str(_MINISTACK_SNAPSHOTS)]
            stop_seconds, lock = _KEEP_STATE_SECONDS, self._state.lock
        with running_server(
            command,
            endpoint_url,
            environment,
            self._folder,
            stop_seconds=stop_seconds,
            watchdog=self._watchdog,
            lock=lock,
        ) as process:
            yield process, port
