"""Every call of a join fails in turn: there is the whole output, or none and the shards stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.faults import Call, Fault, faults_of, in_process, profiled
from tests.long_parameters import with_long
from tests.offline.given import line
from tidemill.cli.main import exit_status_of, main, parse
from tidemill.offline.console.errors import RunIncomplete

FOLDERS = ("offline/files", "batch/file")
ONE_IN = 151


@pytest.mark.parametrize("one_in", [ONE_IN, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("flags", with_long([["--remove"], ["-i", "in.jsonl"]], [[]]))
def test_a_join_that_fails_leaves_the_shards(  # noqa: PLR0917 - fixtures and cases
    run: Any,
    write_input: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    one_in: int,
) -> None:
    """The same command then joins them."""
    monkeypatch.chdir(tmp_path)
    write_input(*(line(str(number)) for number in range(8)))
    assert run("-i", "in.jsonl", "-o", "whole") == 0
    shards = ("out.1-of-2", "out.2-of-2")
    for number in (1, 2):
        assert run("-i", "in.jsonl", "-o", "out", "--shard", f"{number}/2") == 0
    kept = {path: path.read_bytes() for path in tmp_path.glob("out.*")}
    whole, out = (tmp_path / "whole").read_bytes(), tmp_path / "out"
    counts = Counter[Call]()

    arguments = parse(["join", "out", *flags])  # where an exit with 0 is that of `--help`

    def join(fault: Fault | None) -> int:
        with profiled(FOLDERS, fault) as found:
            status = exit_status_of(lambda: int(arguments.command(arguments)))
        counts.update(found)
        return status

    assert join(None) == 0
    for fault in [*faults_of(Counter(counts), one_in=one_in)]:
        out.unlink(missing_ok=True)
        for path, data in kept.items():
            path.write_bytes(data)
        status = in_process(lambda fault=fault: join(fault), tmp_path / "stderr")  # type: ignore[misc]
        if status == 0 or out.exists():
            assert out.read_bytes() == whole, fault
        if not out.exists():
            assert all((tmp_path / name).exists() for name in shards), fault
            assert main(["join", "out", *flags]) == 0, fault
            assert out.read_bytes() == whole, fault


def test_an_output_has_its_settings_when_it_appears(
    run: Any, write_input: Callable[..., Path], tmp_path: Path
) -> None:
    """A later retry compares them, so a join that ends between the two has no output."""
    source, out = write_input(line("a"), line("b")), tmp_path / "out"
    for number in (1, 2):
        assert run("-i", source, "-o", out, "--shard", f"{number}/2") == 0
    with patch("tidemill.offline.files.shard_join.joined_settings", side_effect=MemoryError):
        assert main(["join", str(out)]) == RunIncomplete.exit_status
    assert not out.exists()
    assert main(["join", str(out)]) == 0
    assert (tmp_path / "out.settings").exists()


def test_a_join_that_is_killed_between_two_files_is_repeated(
    run: Any, write_input: Callable[..., Path], tmp_path: Path
) -> None:
    """The same command replaces the error file, which it does not without such a kill."""
    source, out, errors = write_input(line("a"), line("b", status=400)), tmp_path / "out", "errors"
    flags = ["-e", str(tmp_path / errors)]
    for number in (1, 2):
        assert run("-i", source, "-o", out, *flags, "--shard", f"{number}/2") == 0
    assert main(["join", str(out), *flags]) == 0
    whole, failed = out.read_bytes(), (tmp_path / errors).read_bytes()
    out.rename(tmp_path / "out.joining")
    assert main(["join", str(out), *flags]) == 0
    assert (out.read_bytes(), (tmp_path / errors).read_bytes()) == (whole, failed)
    out.unlink()
    assert main(["join", str(out), *flags]) == 2
