"""Truncated answers, cut off at their token limit: counted in whatever way a run ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.offline.conftest import Runner
from tests.offline.given import line
from tidemill.demo import MODEL_PATH
from tidemill.offline.run.metrics import RunMetrics
from tidemill.offline.run.run_card import as_markdown
from tidemill.offline.run.tally import Tally

Write = Callable[..., Path]


@pytest.fixture
def run(run: Runner) -> Runner:
    """Run with a card."""
    run.has_card = True
    return run


def answer(name: str, *finish_reasons: str, **body: Any) -> str:
    """Return a request that is answered with choices of these finish reasons."""
    choices = [
        {"message": {"content": '{"finish_reason":"length"}'}, "finish_reason": reason}
        for reason in finish_reasons
    ]
    return line(name, temperature=0, reply={"created": 1, "choices": choices}, **body)


LINES = [
    answer("a", "stop"),
    answer("b", "length"),
    line("c", name="c", status=400),
    answer("d", "stop", "length"),
    answer("e", "tool_calls"),
    line("f", name="f"),
]


def card_of(folder: Path) -> dict[str, Any]:
    """Return the run card of `rows.jsonl`."""
    card: dict[str, Any] = json.loads((folder / "rows.card.json").read_text(encoding="utf-8"))
    return card


def truncated_of(folder: Path) -> int:
    """Return the count of the run card of `rows.jsonl`."""
    return int(card_of(folder)["rows"]["truncated"])


def test_a_summary_and_a_card_count_truncated_answers(
    run: Runner, write_input: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A choice of several is enough; a text that looks like the field does not count."""
    assert run("-i", write_input(*LINES), "-o", tmp_path / "rows.jsonl") == 0
    stderr = capsys.readouterr().err
    assert "6 rows in" in stderr
    assert "5 ok, 1 failed" in stderr
    assert "  2 answers reached the token limit (finish reason `length`)" in stderr
    assert truncated_of(tmp_path) == 2
    shown = as_markdown(card_of(tmp_path))
    assert "| rows | 6 rows: 5 ok (2 truncated), 1 failed |" in shown


def test_a_run_of_complete_answers_does_not_mention_them(
    run: Runner, write_input: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the summary nor the Markdown of the card has a zero."""
    assert run("-i", write_input(LINES[0]), "-o", tmp_path / "rows.jsonl") == 0
    assert "cut off" not in capsys.readouterr().err
    assert "truncated" not in as_markdown(card_of(tmp_path))
    earlier = dict(card_of(tmp_path))  # a card of an earlier version has no seconds by cause
    del earlier["seconds_by_cause"]
    assert "truncated" not in as_markdown(earlier)
    assert truncated_of(tmp_path) == 0


@pytest.mark.parametrize("flags", [(), ("--dialect", "vllm"), ("-e", "errors.jsonl")])
def test_a_resumed_run_counts_the_rows_of_all_runs(
    run: Runner,
    write_input: Write,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
) -> None:
    """Kept rows count, and so do those that are retried or were finished already."""
    errors = tmp_path / "errors.jsonl"
    flags = tuple(str(errors) if flag == "errors.jsonl" else flag for flag in flags)
    source, out = write_input(*LINES), tmp_path / "rows.jsonl"
    run("-i", source, "-o", out, *flags)
    rows = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(rows[:2]))
    errors.unlink(missing_ok=True)
    run("-i", source, "-o", out, "--resume", *flags)
    assert truncated_of(tmp_path) == 2
    run("-i", source, "-o", out, "--resume", "--retry-failed", *flags)
    assert truncated_of(tmp_path) == 2
    capsys.readouterr()
    run("-i", source, "-o", out, "--resume", *flags)
    stderr = capsys.readouterr().err
    assert "nothing to run\n  2 answers reached the token limit" in stderr
    assert truncated_of(tmp_path) == 2


def test_reused_results_count(run: Runner, write_input: Write, tmp_path: Path) -> None:
    """A second run that computes nothing has truncated answers, too."""
    source = write_input(answer("a", "length"), answer("b", "stop"))
    flags = ("--model", MODEL_PATH, "--any-model", "--reuse", tmp_path / "kept", "--force")
    run("-i", source, "-o", tmp_path / "rows.jsonl", *flags)
    run.engine = None
    run("-i", source, "-o", tmp_path / "rows.jsonl", *flags)
    assert run.engine is None
    assert truncated_of(tmp_path) == 1


def test_shards_count_their_own_rows(
    run: Runner, write_input: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each shard's summary has its own truncated answer."""
    source = write_input(*LINES[:2], *LINES[:2])
    for shard in ("1/2", "2/2"):
        run("-i", source, "-o", tmp_path / "rows.jsonl", "--shard", shard)
        assert "1 answer reached the token limit" in capsys.readouterr().err


def test_metrics_count_truncated_rows_of_the_output() -> None:
    """The counter is that of the writer while a run lasts, and zero before."""

    class Writer:
        num_truncated = 3

    tally = Tally()
    metrics = RunMetrics(tally)

    def value() -> float:
        return next(
            sample.value
            for metric in metrics.collect()
            for sample in metric.samples
            if sample.name == "tidemill_truncated_rows_total"
        )

    assert value() == 0
    metrics.writer = Writer()  # type: ignore[assignment]
    assert value() == 3
