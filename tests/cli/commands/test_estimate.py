"""An estimate counts lines and tokens as a run would, without weights or with a sample."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.offline.given import line, rows
from tidemill.cli.main import main
from tidemill.demo import MODEL_PATH, NAME
from tidemill.engine.speculation.cost_model import CostModel, Work
from tidemill.offline.estimate import estimate
from tidemill.offline.run.run_options import RunOptions

Write = Callable[..., Path]


def chat(number: int, text: str, **more: Any) -> str:
    """Return a line of the demo model."""
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 8}
    return line(str(number), model=NAME, **body | more)


@pytest.fixture(name="source")
def fixture_source(write_input: Write) -> Path:
    """Return a file with a repeat, a prefix that lines share, and lines that would fail."""
    shared = "Count the words of this text. " * 20
    return write_input(
        *(chat(number, f"{shared}{number}?") for number in range(8)),
        chat(8, f"{shared}0?"),
        chat(9, "a", max_tokens=16, n=2),
        chat(10, "a " * 10_000),
        chat(11, "a", regex="[a-z"),
        chat(12, "a", max_tokens=None),
    )


def estimated(capsys: pytest.CaptureFixture[str], source: Path, *flags: str) -> dict[str, Any]:
    """Return the estimate of a file."""
    assert main(["estimate", str(source), "--json", *flags]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_tokens_are_those_of_a_run(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each line that can run counts, those that cannot are named, nothing is written."""
    found = estimated(capsys, source)
    assert [path.name for path in tmp_path.iterdir()] == [source.name]
    assert (found["num_lines"], found["num_failing"], found["num_repeats"]) == (13, 2, 1)
    kind = {"url": "/v1/chat/completions", "model": NAME, "num_lines": 13}
    assert found["kinds"] == [kind]
    assert found["num_unlimited"] == 1
    assert any("maximum context length" in reason for reason in found["reasons"])
    assert any("unclosed character class" in reason for reason in found["reasons"])
    out = tmp_path / "rows.jsonl"
    assert main(["run", "-i", str(source), "-o", str(out)]) == 0
    usages = [row["response"]["body"].get("usage") for row in rows(out)]
    ran = [usage for usage in usages if usage is not None]
    counts = sorted(usage["prompt_tokens"] for usage in ran)
    assert found["prompt_tokens"] == sum(counts)
    assert (found["quantiles"]["least"], found["quantiles"]["most"]) == (counts[0], counts[-1])
    assert found["shared_tokens"] > found["prompt_tokens"] / 2
    assert found["most_output_tokens"] >= sum(usage["completion_tokens"] for usage in ran)


def test_prompts_of_one_request_count_in_full(
    write_input: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the reads of a decision count their common beginning once, as their usage does."""
    text = "Count the words of this text. "
    request = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    one, two = (
        estimated(capsys, write_input(json.dumps({**request, "body": {"prompt": prompts}})))
        for prompts in ([text], [f"{text}One.", f"{text}Two."])
    )
    assert two["prompt_tokens"] > 2 * one["prompt_tokens"]


def test_a_shard_is_estimated_by_itself(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lines of all shards are those of the file."""
    found = [estimated(capsys, source, "--shard", f"{number}/2") for number in (1, 2)]
    assert sum(each["num_lines"] for each in found) == 13


def test_reused_lines_need_no_work(
    write_input: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their tokens are not counted, and stored results stay unchanged."""
    kept = ("--reuse", str(tmp_path / "kept"))
    old = [chat(number, f"{number} and {number}") for number in range(4)]
    source = write_input(*old)
    assert main(["run", "-i", str(source), "-o", str(tmp_path / "rows.jsonl"), *kept]) == 0
    capsys.readouterr()
    new = chat(9, "What is new?")
    alone = estimated(capsys, write_input(new))
    both = write_input(*old, new)
    found = estimated(capsys, both, *kept)
    assert (found["num_lines"], found["num_reused"]) == (5, 4)
    same = ("prompt_tokens", "quantiles", "most_output_tokens", "num_failing", "num_repeats")
    assert [found[name] for name in same] == [alone[name] for name in same]
    assert estimated(capsys, both)["num_reused"] == 0
    assert estimated(capsys, write_input(*old), *kept)["prompt_tokens"] is None
    assert main(["estimate", str(write_input(*old)), *kept]) == 0
    assert "none: every line has a stored result" in capsys.readouterr().out


def test_time_and_cost_come_from_what_tokens_have_cost(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are not known before any run, and no number stands in for them."""
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path / "cache"))
    flags = ["--device", "cpu", "--price-per-hour", "7.2"]
    found = estimated(capsys, source, *flags)
    assert (found["seconds"], found["cost"]) == (None, None)
    assert main(["estimate", str(source)]) == 0
    assert "unknown: run a file with this model here first" in capsys.readouterr().out
    model = CostModel(fixed_seconds=5.0)
    model.add(Work(prefilled=1_000), 50.0)
    model.add(Work(decoded=1_000), 50.0)
    model.save(str(MODEL_PATH), "cpu", 1.0)
    found = estimated(capsys, source, *flags)
    computed = found["prompt_tokens"] - found["shared_tokens"]
    expected = 1.2 + 5 + 0.05 * (computed + found["output_tokens"])
    assert found["seconds"] == pytest.approx(expected, rel=0.01)
    assert found["cost"] == pytest.approx(expected * 0.002, rel=0.01)


def test_a_sample_measures_the_length_of_answers(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its rows are discarded, and failed lines are ignored."""
    found = estimated(capsys, source, "--sample", "13")
    out = tmp_path / "rows.jsonl"
    assert main(["run", "-i", str(source), "-o", str(out), "--no-card"]) == 0
    usages = [row["response"]["body"].get("usage") for row in rows(out)]
    total = sum(usage["completion_tokens"] for usage in usages if usage is not None)
    assert found["output_tokens"] < 512
    assert found["num_sampled"] == 11
    assert abs(found["output_tokens"] - total) <= 0.5 * total
    assert {path.name for path in tmp_path.iterdir()} == {
        *(source.name, "rows.jsonl", "rows.jsonl.settings")
    }


def test_a_sample_of_a_table_runs_its_rendered_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sample of one shard of a table teaches lengths, and the empty cell is named."""
    table = tmp_path / "cities.csv"
    table.write_text("country\n\nFrance\nItaly\nSpain\n", encoding="utf-8")
    recipe = ("--prompt", "The capital of {{ country }}?", "--max-tokens", "8")
    found = estimated(capsys, table, *recipe, "--sample", "4", "--shard", "1/2")
    assert (found["num_lines"], found["num_sampled"], found["num_failing"]) == (2, 1, 1)
    assert 0 < found["output_tokens"] <= found["most_output_tokens"]
    assert "column `country` is null" in found["reasons"][0]
    assert [path.name for path in tmp_path.iterdir()] == [table.name]


def test_a_file_without_runnable_lines_is_reported(
    write_input: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reasons are printed and the exit status is 1; a missing file is refused."""
    source = write_input('{"custom_id": "a"}', chat(1, "a", temperature=-1))
    assert main(["estimate", str(source)]) == 1
    words = capsys.readouterr().out
    assert "would fail" in words
    assert "1 × `url` is required" in words
    assert main(["estimate", str(source.with_name("gone"))]) == 2
    too_long = write_input(*(chat(number, "a " * 10_000) for number in range(3)))
    assert main(["estimate", str(too_long)]) == 1
    assert "would fail  3 lines" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--device", "cuda"], "torch finds no CUDA device"),
        (["--output-tmp-dir", "gone"], "the folder gone of --output-tmp-dir does not exist"),
    ],
)
def test_what_a_run_refuses_is_refused(
    source: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    """In the same words, and a folder as its input, too."""
    assert main(["estimate", str(source), *flags]) == 2
    assert words in capsys.readouterr().err
    assert main(["estimate", str(source.parent)]) == 2


def test_a_sample_that_is_stopped_ends_the_estimate(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends like a stopped run; a line that would fail is not sampled."""
    sampled = []

    def stopped(options: RunOptions, **_: object) -> int:
        sampled.append(Path(options.input_file).read_text(encoding="utf-8"))
        return 130

    monkeypatch.setattr(estimate, "run_job", stopped)
    assert main(["estimate", str(source), "--sample", "11"]) == 130
    assert len(sampled[0].splitlines()) == 11
    assert "a a a" not in sampled[0]


@pytest.mark.parametrize("is_table", [True, False])
def test_a_sample_with_known_answers_states_their_accuracy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, is_table: bool
) -> None:
    """Only gold answers of sampled rows count."""
    num_rows, gold = 24, tmp_path / "gold.csv"
    gold.write_text("custom_id,good\n" + "".join(f"k{n},yes\n" for n in range(num_rows)))
    flags = ["--sample", "12", "--gold"]
    if is_table:
        source = tmp_path / "t.csv"
        source.write_text("text,label\n" + "".join(f"{n},yes\n" for n in range(num_rows)))
        flags += ["label", "--ask", "good: Is it good?", "--prompt", "{{ text }}"]
    else:
        source, url = tmp_path / "x.jsonl", "/v1/decisions"
        question = {"type": "predicate", "name": "good", "instructions": "Is it good?"}
        bodies = [
            {"model": NAME, "input": f"{n}", "questions": [question]} for n in range(num_rows)
        ]
        lines = [
            {"custom_id": f"k{n}", "method": "POST", "url": url, "body": body}
            for n, body in enumerate(bodies)
        ]
        source.write_text("".join(json.dumps(each) + "\n" for each in lines))
        flags.append(str(gold))
    assert main(["estimate", str(source), *flags]) == 0
    shown = capsys.readouterr().out
    assert f"on 12 sampled {'rows' if is_table else 'lines'}:" in shown
    assert "good: platt calibration fitted on 12 rows, measured on 12 of 12 gold rows" in shown
    assert "of all rows at 100% accuracy" in shown
    assert "ID no row has" not in shown
