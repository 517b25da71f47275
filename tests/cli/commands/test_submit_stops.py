"""`tidemill submit` as a process that is stopped in the middle, or short of memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from tests.cli.api_rig import Shell, line
from tests.long_parameters import with_long

ROOT = Path(__file__).parents[3]
LARGE = [line(str(number), pad="x" * 2**20) for number in range(8)]
SECONDS = 60


class Held:
    """Lets the storage take some parts and then no more, until it is let go."""

    def __init__(self, shell: Shell, num_parts: int) -> None:
        self._shell = shell
        self._left = num_parts
        self.is_full = Event()
        self.let_go = Event()
        shell.api.seen = self._look

    def _look(self, method: str, _path: str) -> None:
        if method != "PUT":
            return
        with self._shell.api.lock:
            self._left -= 1
            is_taken = self._left >= 0
        if not is_taken:
            self.is_full.set()
            self.let_go.wait(SECONDS)


@pytest.fixture
def held(shell: Shell) -> Iterator[Held]:
    """Return a storage that takes three parts."""
    found = Held(shell, 3)
    yield found
    found.let_go.set()


def started(*arguments: str) -> subprocess.Popen[bytes]:
    """Return a command that has been started in this folder."""
    return subprocess.Popen(
        [sys.executable, "-m", "tidemill", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize(
    ("number", "status"),
    with_long([(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 143)], [(signal.SIGINT, 130)]),
)
def test_an_upload_that_is_stopped_goes_on(
    shell: Shell, held: Held, number: signal.Signals, status: int
) -> None:
    """The parts that were there are not sent again; a signal ends it at once, with a sentence."""
    file = shell.file(*LARGE)
    with started("submit", file) as process:
        assert held.is_full.wait(SECONDS)
        there = wait_for_parts(shell, 3)
        process.send_signal(number)
        out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out) == (status, b"")
    if number is not signal.SIGKILL:
        assert b"run the same command to resume" in err
        assert b"Traceback" not in err
    shell.api.seen = lambda *_: None
    held.let_go.set()
    shell.api.requests.clear()
    result = shell.type("submit", file)
    assert result.status == 0
    sent_again = {n for n in there if shell.api.count("PUT", f"/upload_1/{n}$")}
    assert sent_again == set()
    assert Path(file).read_bytes() in shell.api.files.values()
    assert list(shell.api.uploads) == ["upload_1"]
    assert list((shell.folder / "cache/tidemill/submissions").iterdir()) == []


def wait_for_parts(shell: Shell, num_parts: int) -> set[int]:
    """Return the uploaded parts once there are `num_parts` of them."""
    arrived = Event()
    while True:
        with shell.api.lock:
            parts = set(shell.api.uploads["upload_1"]["parts"])
        if len(parts) >= num_parts:
            return parts
        arrived.wait(0.01)


def peak_bytes(*arguments: str) -> int:
    """Return the most memory that a command took; it must end well."""
    # The peak of getrusage starts with the memory of this process, from which it was forked.
    code = (
        "import re, sys; from pathlib import Path; from tidemill.cli.main import main; "
        "status = main(sys.argv[1:]); state = Path('/proc/self/status').read_text(); "
        "sys.stderr.write(re.search(r'VmHWM:\\s+(\\d+)', state)[1]); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=True,
        timeout=SECONDS,
    )
    return int(done.stderr.split()[-1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux reports the peak")
def test_memory_does_not_grow_with_the_file(shell: Shell) -> None:
    """24 MB in lines of a megabyte are checked, sent and fetched in the memory of a few lines."""
    short = shell.file(line("a", prompt="x" * 10**6), name="short.jsonl")
    long = shell.file(*(line(str(n), prompt="x" * 10**6) for n in range(24)), name="long.jsonl")
    least = peak_bytes("submit", short, "--wait")
    assert peak_bytes("submit", long, "--wait") < least + 16 * 10**6


def test_a_hole_is_not_a_file_of_requests(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terabyte without a newline is refused after its first part, not read to its end."""
    monkeypatch.setattr("tidemill.batch.file.lines.MAX_SKIPPED_BYTES", 2**26)
    with Path("hole.jsonl").open("wb") as file:
        file.write(json.dumps(line("a")).encode() + b"\n")
        file.truncate(2**40)
    result = shell.type("submit", "hole.jsonl")
    assert result.status == 1
    assert "Line 2 is longer than any request may be." in result.err
    assert shell.api.files == {}
