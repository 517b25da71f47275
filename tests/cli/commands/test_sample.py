"""`tidemill sample`: lines picked at random, as they are."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.offline.given import line
from tidemill.cli.main import main
from tidemill.offline.files import request_lines
from tidemill.offline.files.request_lines import choose_sample

LINES = [line(str(number)) for number in range(100)]
Type = Callable[..., bytes]


@pytest.fixture(name="sample")
def fixture_sample(capfdbinary: pytest.CaptureFixture[bytes]) -> Type:
    """Return a function that types the command and returns its standard output."""

    def type_command(*arguments: object, status: int = 0) -> bytes:
        assert main(["sample", *map(str, arguments)]) == status
        return capfdbinary.readouterr().out

    return type_command


def test_a_sample_is_lines_of_the_file_in_their_order(
    write_input: Callable[..., Path], sample: Type
) -> None:
    """The same by the same seed, others by another, all of a file that is shorter."""
    source = write_input(*LINES)
    picked = sample(source, "-n", 10).decode().splitlines()
    assert len(picked) == 10
    assert picked == [each for each in LINES if each in picked]
    assert sample(source, "-n", 10, "--seed", 0).decode().splitlines() == picked
    assert sample(source, "-n", 10, "--seed", 1).decode().splitlines() != picked
    assert sample(source, "-n", 100) == sample(source, "-n", 1000) == source.read_bytes()


def test_every_line_is_as_likely_as_any_other() -> None:
    """Over many seeds."""
    counts = Counter(place for seed in range(3000) for place in choose_sample(10, 3, seed))
    assert len(counts) == 10
    assert all(800 < count < 1000 for count in counts.values())


def test_bytes_are_those_of_the_file(
    tmp_path: Path, sample: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blank lines and the byte order mark go, a last newline comes; long lines go by pieces."""
    monkeypatch.setattr(request_lines, "_PIECE_BYTES", 16)
    path = tmp_path / "in.jsonl"
    long = b'{"pad": "%s\xff \\ud800"}' % (b" x" * 10_000)
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n \t\n' + long + b"\nnot JSON")
    assert sample(path) == b'{"a": 1}\r\n' + long + b"\nnot JSON\n"
    path.write_bytes(b"")
    assert sample(path) == b""


def test_every_form_of_a_file_gives_the_same_lines(
    tmp_path: Path, sample: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compressed, as an array, from standard input."""
    data = "".join(f"{each}\n" for each in LINES).encode()
    plain, packed, array = (tmp_path / name for name in ("a.jsonl", "a.jsonl.gz", "a.json"))
    plain.write_bytes(data)
    packed.write_bytes(gzip.compress(data))
    array.write_text(f"[{', '.join(LINES)}]", encoding="utf-8")
    picked = sample(plain, "-n", 7)
    assert picked == sample(packed, "-n", 7) == sample(array, "-n", 7)
    stdin = io.TextIOWrapper(io.BytesIO(packed.read_bytes()))
    monkeypatch.setattr("sys.stdin", stdin)
    assert sample("-", "-n", 7) == picked


def test_a_file_gets_its_name_when_the_sample_is_whole(tmp_path: Path, sample: Type) -> None:
    """One that is there is kept unless --force is given, and the input in any case."""
    source, out = tmp_path / "in.jsonl.gz", tmp_path / "out.jsonl"
    source.write_bytes(gzip.compress(json.dumps(LINES).encode())[:-20])
    sample(source, "-o", out, status=1)
    assert [path.name for path in tmp_path.iterdir()] == [source.name]
    source.write_bytes(gzip.compress("\n".join(LINES).encode()))
    sample(source, "-n", 3, "-o", out)
    assert out.read_bytes() == sample(source, "-n", 3)
    sample(source, "-o", out, status=2)
    sample(source, "-o", out, "--force")
    assert out.read_bytes().count(b"\n") == 50
    sample(source, "-o", source, "--force", status=2)


def test_a_sample_of_a_table_has_whole_rows_and_the_header(tmp_path: Path, sample: Type) -> None:
    """A quoted newline does not cut a row; the name of the output decides its format."""
    table, packed, out = (tmp_path / name for name in ("a.csv", "a", "b.parquet"))
    pairs = [
        (str(number), f'"a, {number}"\nb\U0001f389' if number % 2 else "") for number in range(40)
    ]
    written = io.StringIO()
    csv.writer(written, delimiter=";").writerows([("id", "text"), *pairs])
    table.write_text(f"\ufeff{written.getvalue()}", encoding="utf-8")
    packed.write_bytes(gzip.compress(table.read_bytes()))
    text = sample(table, "-n", 7)
    header, *picked = map(tuple, csv.reader(io.StringIO(text.decode())))
    assert header == ("id", "text")
    assert len(picked) == 7
    assert picked == [pair for pair in pairs if pair in picked]
    assert sample(packed, "-n", 7) == text
    sample(table, "-o", out)
    assert sample(out, "-n", 7, "-o", tmp_path / "c.csv") == b""
    assert (tmp_path / "c.csv").read_bytes() == text
    sample(out, status=2)
    table.write_text("a,b\n", encoding="utf-8")
    assert sample(table) == b"a,b\n"


def test_anything_but_a_batch_file_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error contains the file's probable format."""
    path = tmp_path / "in.zip"
    path.write_bytes(b"PK\x03\x04")
    assert main(["sample", str(path)]) == 1
    assert "in.zip cannot be read. The file is a zip archive" in capsys.readouterr().err
    assert main(["sample", str(tmp_path / "gone.jsonl")]) == 2
    assert "gone.jsonl does not exist" in capsys.readouterr().err
