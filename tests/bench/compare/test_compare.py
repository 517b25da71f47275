"""The table of a comparison and the counts behind it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.compare.compare import CHOICES, Run, chosen_peers, count_tokens, read_job, table
from bench.compare.peers import Job
from bench.processes import RunFailed

JOB = Job("model", Path("requests.jsonl"), "bench", "bfloat16", num_requests=2)


def run(peer: str, whole_seconds: float, steady_seconds: float, megabytes: int) -> Run:
    """Return a run of 1000 output tokens."""
    return Run("base", peer, whole_seconds, steady_seconds, megabytes * 1_000_000, 500, 1000, 10)


def row(status_code: int, completion_tokens: int) -> str:
    """Return one printed row."""
    usage = {"prompt_tokens": 7, "completion_tokens": completion_tokens}
    response = {"status_code": status_code, "body": {"usage": usage}}
    return json.dumps({"response": response}) + "\n"


def test_ratios_say_how_many_times_better_ours_is() -> None:
    """More than 1 is better for us in every column, less is better for the peer."""
    ours, theirs = run("tidemill", 10, 4, 100), run("vLLM", 80, 2, 150)
    assert table([ours, theirs]).splitlines()[2:] == [
        "| tidemill | 10.0 |  | 250.0 |  | 2.5 |  | 100.0 |  |",
        "| vLLM | 80.0 | 8.00 × | 500.0 | 0.50 × | 5.0 | 0.50 × | 150.0 | 1.50 × |",
    ]


def test_several_runs_give_the_median_and_the_range() -> None:
    """One slow run moves the range, not the figure."""
    runs = [run("tidemill", seconds, 1, 100) for seconds in (11, 90, 10)]
    assert "| 11.0 (10.0–90.0) |" in table(runs)


def test_tokens_are_counted_from_the_rows(tmp_path: Path) -> None:
    """A peer that stops early gets no credit for the requested tokens."""
    path = tmp_path / "rows.jsonl"
    path.write_text(row(200, 128) + row(200, 3))
    assert count_tokens(path, 2) == (14, 131)


@pytest.mark.parametrize("rows", [row(200, 128), row(200, 128) + row(400, 0)])
def test_a_missing_or_failed_row_gives_no_figure(tmp_path: Path, rows: str) -> None:
    """Every request must have been answered for a run to count."""
    path = tmp_path / "rows.jsonl"
    path.write_text(rows)
    with pytest.raises(RunFailed, match="1 of 2 requests answered"):
        count_tokens(path, 2)


def test_a_peer_runs_only_where_its_interpreter_is_given() -> None:
    """Ours comes first; the others follow in the requested order."""
    python = Path("bin/python")
    without = [peer.name for peer in chosen_peers(JOB, [*CHOICES], None, None)]
    among = [peer.name for peer in chosen_peers(JOB, [*CHOICES], python, python)]
    assert without == ["tidemill", "--no-plan", "transformers"]
    assert among == ["tidemill", "--no-plan", "transformers", "vLLM", "OpenVINO"]


def test_a_line_names_the_model_next_to_the_file(tmp_path: Path) -> None:
    """A file is run with its own model, so that files of several models are one comparison."""
    path = tmp_path / "g.jsonl"
    path.write_text(json.dumps({"body": {"model": "46m-152k"}}) + "\n\n")
    assert read_job(path, None, "float32") == Job(
        str(tmp_path / "46m-152k"), path, "46m-152k", "float32", num_requests=1
    )
    assert read_job(path, "other", "float32").model == "other"
