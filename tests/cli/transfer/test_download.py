"""Results to files: what a download survives, and what it refuses."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tidemill.cli.transfer.download import Interrupted, fetch
from tidemill.offline.console.errors import CliError, OutputLost, Refused, Unreachable

BYTES = bytes(range(256)) * 40


@dataclass
class Content:
    """Bytes of which each opening gives some pieces, or fails."""

    pieces: list[list[bytes] | Interrupted]
    num_bytes: int = len(BYTES)
    id: str = "file-0123456789"
    starts: list[int] = field(default_factory=list)

    @contextmanager
    def open(self, start: int) -> Iterator[Iterator[bytes]]:
        """Yield the next pieces, regardless of the range."""
        self.starts.append(start)
        piece = self.pieces.pop(0)
        if isinstance(piece, Interrupted):
            raise piece
        yield iter(piece)


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    """Return the recorded waits, which do not sleep."""
    found: list[float] = []
    monkeypatch.setattr("tidemill.offline.console.backoff.sleep", found.append)
    monkeypatch.chdir(tmp_path)
    return found


def test_it_goes_on_behind_what_has_come(pauses: list[float]) -> None:
    """After a break, an early end and a server that is busy; each time from where it stood."""
    content = Content(
        [
            [BYTES[:100], BYTES[100:300]],
            Interrupted("busy", 4),
            [],
            [BYTES[300:]],
        ]
    )
    fetch(content, "rows", force=False)
    assert Path("rows").read_bytes() == BYTES
    assert content.starts == [0, 300, 300, 300]
    assert pauses == [0.5, 4, 1.0]


def test_it_goes_on_behind_what_another_command_left() -> None:
    """Only the same file is resumed: another one has another temporary name."""
    Path(".rows.23456789.part").write_bytes(BYTES[:1000])
    Path(".rows.abcdefgh.part").write_bytes(b"another's")
    content = Content([[BYTES[1000:]]])
    fetch(content, "rows", force=False)
    assert Path("rows").read_bytes() == BYTES
    assert content.starts == [1000]


def test_it_gives_up_after_a_while_and_keeps_what_it_has(pauses: list[float]) -> None:
    """The next command can resume; the final name does not exist yet."""
    content = Content([[BYTES[:10]], *(Interrupted("gone") for _ in range(1000))])
    with pytest.raises(Unreachable, match=r"rows stopped at byte 10 of 10,240: gone"):
        fetch(content, "rows", force=False)
    assert 800 < sum(pauses) <= 900
    assert Path(".rows.23456789.part").read_bytes() == BYTES[:10]
    assert not Path("rows").exists()


def test_more_bytes_than_expected_are_an_error() -> None:
    """The length is checked."""
    with pytest.raises(CliError, match=r"10,241 bytes instead of 10,240"):
        fetch(Content([[BYTES, b"x"]]), "rows", force=False)
    assert not Path("rows").exists()


def test_a_name_that_was_taken_meanwhile_is_left_alone() -> None:
    """Only `force` overwrites it."""
    Path("rows").write_text("mine")
    with pytest.raises(Refused, match="rows already exists"):
        fetch(Content([[BYTES]]), "rows", force=False)
    assert Path("rows").read_text() == "mine"
    fetch(Content([]), "rows", force=True)
    assert Path("rows").read_bytes() == BYTES


def test_two_commands_do_not_write_one_file() -> None:
    """The second one is refused."""
    with Path(".rows.23456789.part").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(Refused, match="another command is currently downloading rows"):
            fetch(Content([]), "rows", force=False)


def test_a_reader_that_has_gone_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """`results -o - | head` ends in this way."""

    class Gone:
        """A pipe without a reader."""

        class buffer:  # noqa: N801 - the name it has
            """The binary stream."""

            @staticmethod
            def write(_: object) -> int:
                """Fail as the system does."""
                raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("sys.stdout", Gone)
    with pytest.raises(OutputLost, match="standard output cannot be written: Broken pipe"):
        fetch(Content([[BYTES]]), "-", force=False)
