"""A run that reaches its limit of time or cost ends with what is done, one row a line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.offline.given import line, rows
from tidemill.offline.console.errors import OVER_LIMIT, Refused

Write = Callable[..., Path]


@pytest.mark.parametrize(
    "limit", ["--max-seconds 0.5", "--max-cost 0.001 --price-per-hour 7.2"], ids=["time", "cost"]
)
def test_lines_that_have_not_run_say_so_and_can_be_run(
    run: Any, write_input: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str], limit: str
) -> None:
    """Their rows are in order; a retry gives the file of an unlimited run."""
    slow = {1, 4}
    source = write_input(
        *(line(str(n), wait=60 if n in slow else 0) for n in range(6)), "no request"
    )
    out, whole = tmp_path / "out", tmp_path / "whole"
    flags = ["-i", source, "--on-invalid-line", "skip"]
    assert run(*flags, "-o", out, *limit.split()) == OVER_LIMIT
    written = rows(out)
    assert [row["custom_id"] for row in written] == ["0", "1", "2", "3", "4", "5", None]
    codes = [None if row["error"] is None else row["error"]["code"] for row in written]
    assert codes == [None, "batch_expired", None, None, "batch_expired", None, "invalid_json_line"]
    assert "2 × This line was not run: the run reached --max-seconds" in capsys.readouterr().err
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["in.jsonl", "out", "out.settings"]  # for the retry
    run.speed = 1_000
    assert run(*flags, "-o", out, "--resume", "--retry-failed") == 0
    assert run.engine.num_requests == 2
    assert run(*flags, "-o", whole) == 0
    assert out.read_bytes() == whole.read_bytes()


def test_a_limit_that_is_not_reached_changes_nothing(
    run: Any, write_input: Write, tmp_path: Path
) -> None:
    """It does not delay the end of a run either."""
    source = write_input(line("a"), line("b"))
    assert run("-i", source, "-o", tmp_path / "out", "--max-seconds", "3600") == 0


def test_a_cost_needs_a_price(run: Any, write_input: Write, tmp_path: Path) -> None:
    """The error comes before anything is read."""
    with pytest.raises(Refused, match="--max-cost requires --price-per-hour"):
        run("-i", write_input(line("a")), "-o", tmp_path / "out", "--max-cost", "1")
