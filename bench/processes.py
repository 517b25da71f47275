"""Runs one command and measures it from outside: seconds, the phase between two marks, memory."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

SAMPLE_SECONDS = 0.25
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SHOWN_LOG_LINES = 20


class RunFailed(Exception):
    """Error of a measured command that failed or lacked the expected output; it shows the log."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Marks in a command's output (regular expressions): ready to generate, and all done."""

    ready: str
    done: str


@dataclass(frozen=True, slots=True)
class Measured:
    """One run. `steady_seconds` are between the marks, with prefill and without loading.

    The first mark comes `ready_seconds` after the launch.
    """

    whole_seconds: float
    ready_seconds: float
    steady_seconds: float
    peak_bytes: int


def measure(
    command: list[str], environment: Mapping[str, str], marks: Marks, log: Path
) -> Measured:
    """Run `command` to its end and measure it; its output goes to `log`.

    Raises RunFailed if it exits with a status other than 0 or a mark does not appear.
    """
    started = time.monotonic()
    with (
        log.open("wb") as log_file,
        subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process,
        PeakMemory(process.pid) as memory,
    ):
        assert process.stdout is not None
        seen = first_times(process.stdout, marks, log_file)
        status = process.wait()
    whole_seconds = time.monotonic() - started
    if status != 0:
        raise RunFailed(f"{command[0]} … exited with status {status}.\n{tail(log)}")
    missing = [mark for mark in (marks.ready, marks.done) if mark not in seen]
    if missing:
        raise RunFailed(f"{command[0]} … never printed {missing}.\n{tail(log)}")
    ready, done = seen[marks.ready], seen[marks.done]
    return Measured(whole_seconds, ready - started, done - ready, memory.peak_bytes)


def first_times(output: IO[bytes], marks: Marks, log_file: IO[bytes]) -> dict[str, float]:
    """Copy `output` to `log_file` and return when each mark was first printed.

    A progress bar redraws its line with a bare carriage return, which also ends a line here.
    """
    seen: dict[str, float] = {}
    pending = b""
    while chunk := os.read(output.fileno(), 65_536):
        now = time.monotonic()
        log_file.write(chunk)
        *lines, pending = re.split(rb"[\r\n]", pending + chunk)
        text = b"\n".join(lines).decode(errors="replace")
        for mark in (marks.ready, marks.done):
            if mark not in seen and re.search(mark, text):
                seen[mark] = now
    return seen


def tail(log: Path) -> str:
    """Return the last lines of a log."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-SHOWN_LOG_LINES:])


class PeakMemory:
    """Samples the memory of a process and all its descendants while the context is open.

    The result is the private pages of every process plus the largest shared pages of one: the sum
    of their resident sizes would count each shared library once per process.
    """

    def __init__(self, root_pid: int) -> None:
        self.peak_bytes = 0
        self._root_pid = root_pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_stopped, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample_until_stopped(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self.peak_bytes = max(self.peak_bytes, tree_bytes(self._root_pid))


def tree_bytes(root_pid: int) -> int:
    """Return the bytes that a process and its descendants hold now."""
    private_pages, shared_pages = 0, 0
    for pid in descendants(root_pid):
        try:
            fields = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        resident, shared = int(fields[1]), int(fields[2])
        private_pages += resident - shared
        shared_pages = max(shared_pages, shared)
    return (private_pages + shared_pages) * PAGE_BYTES


def descendants(root_pid: int) -> list[int]:
    """Return the process and all its descendants that still run."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            parent_pid = int(stat.rpartition(")")[2].split()[1])
            children.setdefault(parent_pid, []).append(int(entry.name))
    found = [root_pid]
    for pid in found:
        found.extend(children.get(pid, []))
    return found
