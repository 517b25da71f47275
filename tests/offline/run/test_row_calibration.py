"""Calibration of the rows of decision requests, through `tidemill run` and `tidemill calibrate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tidemill.cli.main import main
from tidemill.offline.console.errors import BadInput, Refused

_NUM_ROWS = 60
_QUESTIONS = [
    {"type": "predicate", "name": "good", "instructions": "?"},
    {"type": "choice", "name": "team", "instructions": "?", "choices": [{"value": "a"}]},
]


def _share(number: int) -> float:
    return (0.7 if number % 2 else 0.9) + number / 1000


def _decision(number: int) -> dict[str, Any]:
    share = _share(number)
    shares = [{"value": "a", "probability": share}, {"value": True, "probability": 1 - share}]
    levels = [
        {"value": 0, "label": "low", "probability": 0.25},
        {"value": 1, "label": "high", "probability": 0.75},
    ]
    return {
        "answers": [
            {"type": "predicate", "name": "good", "probability": share},
            {"type": "choice", "name": "team", "choice": "a", "confidence": share}
            | {"probabilities": shares},
            {"type": "score", "name": None, "score": 0.75, "confidence": 0.75}
            | {"probabilities": levels},
        ],
        "usage": {"input_tokens": 3, "output_tokens": 0, "total_tokens": 3},
    }


def _system_one(number: int) -> dict[str, Any]:
    share = _share(number)
    return {
        "answers": {
            "good": {"type": "noul", "noul": share, "confidence": share / 2}
            | {"probabilities": {"yes": share, "no": 1 - share}},
            "team": {"type": "choice", "choice": "a", "confidence": share / 2}
            | {"probabilities": {"a": share, "true": 1 - share}},
            "3": {"type": "score", "score": 0.75, "confidence": 0.375}
            | {"legend": {"0": "low", "1": "high"}, "probabilities": {"0": 0.25, "1": 0.75}},
        },
        "usage": {"input_tokens": 3, "output_tokens": 0},
        "diagnostics": {name: {"label_mass": 0.5} for name in ("good", "team", "3")},
    }


def _requests(folder: Path, url: str) -> Path:
    """Return a file of requests whose replies a scripted engine copies; the last one fails."""
    path = folder / "x.jsonl"
    reply = _decision if url == "/v1/decisions" else _system_one
    with path.open("w") as file:
        for number in range(_NUM_ROWS):
            body: dict[str, Any] = {"reply": reply(number)}
            if url == "/v1/decisions":
                body |= {"input": "\u2028", "questions": _QUESTIONS[:1]}
            else:
                body |= {
                    "state": "\u2028",
                    "questions": {"good": {"type": "noul", "instructions": "?"}},
                }
            line = {"custom_id": f"k{number}", "method": "POST", "url": url, "body": body}
            file.write(json.dumps(line) + "\n")
    return path


def _gold(folder: Path, url: str) -> Path:
    if url == "/v1/systemone":
        path = folder / "gold.jsonl"
        with path.open("w") as file:
            for n in range(_NUM_ROWS + 1):
                answers = {"good": n % 2 == 0, "team": ["a", "true"][n % 2], "3": n % 2}
                file.write(json.dumps({"custom_id": f"k{n}", **answers}) + "\n")
        return path
    path = folder / "gold.csv"
    rows = (f"k{n},{n % 2 == 0},{['a', 'true'][n % 2]},{n % 2}\n" for n in range(_NUM_ROWS))
    path.write_text("custom_id,good,team,3\n" + "".join(rows) + "unknown,yes,a,low\n")
    return path


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def _answers(row: dict[str, Any]) -> dict[str, Any]:
    answers = row["response"]["body"]["answers"]
    if isinstance(answers, dict):
        return answers
    return {each["name"] or str(place): each for place, each in enumerate(answers, 1)}


@pytest.mark.parametrize("url", ["/v1/decisions", "/v1/systemone"])
def test_a_run_of_requests_is_calibrated_and_resumes_to_the_same_bytes(
    run: Any, tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each answer has its raw probabilities, so that rows can be calibrated again."""
    source, target, gold = _requests(tmp_path, url), tmp_path / "out.jsonl", _gold(tmp_path, url)
    assert run(source, "-o", target) == 0
    plain = _rows(target)
    run.has_card = True
    flags = ("--gold", gold, "--card-markdown")
    assert run(source, "-o", target, "--force", *flags) == 0
    shown = capsys.readouterr().err
    assert "good: platt calibration fitted on 60 rows, measured on 60 of 60 gold rows" in shown
    assert "gold answers whose ID no row has: 1" in shown
    whole, rows = target.read_bytes(), _rows(target)
    even, odd = _answers(rows[0]), _answers(rows[1])
    assert even["good"]["raw_probabilities"] == pytest.approx([0.9, 0.1])
    yes = "probability" if url == "/v1/decisions" else "noul"
    assert even["good"][yes] > 0.9
    assert odd["good"][yes] < 0.1
    assert (even["team"]["choice"], odd["team"]["choice"]) == (
        "a",
        True if url == "/v1/decisions" else "true",
    )
    mass = 1.0 if url == "/v1/decisions" else 0.5
    assert odd["team"]["confidence"] == pytest.approx(mass * (1 - odd["good"][yes]), rel=1e-6)
    assert odd["3"]["score"] == pytest.approx(0.5, abs=0.01)
    card = json.loads((tmp_path / "out.card.json").read_text())
    assert [each["name"] for each in card["calibration"]] == ["good", "team", "3"]
    assert {each["plot"] for each in card["calibration"]} == {"out.calibration.svg"}
    assert (
        "![Accuracy by confidence](out.calibration.svg)" in (tmp_path / "out.card.md").read_text()
    )
    assert "good: accuracy 50.0% before" in (tmp_path / "out.calibration.svg").read_text()
    assert run(source, "-o", target, "--resume", *flags) == 0
    assert target.read_bytes() == whole
    # Another calibration starts from the raw probabilities.
    assert main(["calibrate", str(target), "--calibrate", "batch", "--prior", "even"]) == 0
    assert target.read_bytes() != whole
    again = ["calibrate", str(target), "--calibration", str(tmp_path / "saved.json")]
    (tmp_path / "saved.json").write_text(_saved(tmp_path / "out.calibration.json"))
    assert main(again) == 0
    for row, before in zip(_rows(target), plain, strict=True):
        for name, answer in _answers(row).items():
            assert sum(answer.pop("raw_probabilities")) == pytest.approx(1)
            assert _rounded(answer) == _rounded(_answers(before)[name])


def _rounded(value: Any) -> Any:
    return json.loads(json.dumps(value), parse_float=lambda text: round(float(text), 9))


def _saved(path: Path) -> str:
    """Return a calibration that changes nothing."""
    value = json.loads(path.read_text())
    for question in value["questions"]:
        question["map"] = {"scale": 1.0, "offsets": [0.0, 0.0]}
    return json.dumps(value)


@pytest.mark.parametrize(
    ("gold", "words"),
    [
        ("", "gold.csv cannot be read"),
        ("custom_id,good\nk1,maybe\n", "gold.csv, row 1: 'maybe' is not an answer to `good`"),
        ("custom_id,good\nk1,\n", "gold.csv has 0 answers to `good`: at least 10 are required"),
        (
            "custom_id,good\n" + "".join(f"z{n},yes\n" for n in range(12)),
            "out.jsonl cannot be calibrated: `good` has 0 rows with a gold answer: at least 10",
        ),
        ("custom_id,god\nk1,yes\n", "one for each question with gold answers (good, team, 3)"),
        ("id,good\nk1,yes\n", "must have the column `custom_id`"),
        (
            "custom_id,good\nk1,yes\nk1,no\n",
            "row 2: 'k1' has the answer 'false' to `good`, and 'true' in an earlier row: remove",
        ),
        ("PAR1", "gold.csv cannot be read"),
    ],
)
def test_an_unsuitable_gold_file_leaves_the_rows_as_they_are(
    run: Any, tmp_path: Path, gold: str, words: str
) -> None:
    """The error says how to go on without another run."""
    source, target = _requests(tmp_path, "/v1/decisions"), tmp_path / "out.jsonl"
    path = tmp_path / "gold.csv"
    path.write_text(gold)
    with pytest.raises(BadInput) as refused:
        run(source, "-o", target, "--gold", path)
    assert words in str(refused.value)
    assert "calibrate them with `tidemill calibrate`" in str(refused.value)
    assert b"raw_probabilities" not in target.read_bytes()
    assert not (tmp_path / "out.calibration.json").exists()


def test_unsuitable_flags_are_refused_before_the_run(run: Any, tmp_path: Path) -> None:
    """Nothing is written."""
    source, target = _requests(tmp_path, "/v1/decisions"), tmp_path / "out.jsonl"
    saved = tmp_path / "c.json"
    head = {"object": "decision.calibration", "version": 1, "questions": []}
    saved.write_text(json.dumps({**head, "settings": {"--model": {"name": "other"}}}))
    for flags, words in [
        (["--gold", "label"], "--gold label is not a file: rows of requests have no columns"),
        (["--calibrate", "platt"], "needs `gold`"),
        (["--prior", "even"], "add calibrate = 'batch'"),
        (["--calibrate", "batch", "--prior", "even", "--shard", "1/2"], "with --shard: calibrate"),
        (["--calibration", tmp_path / "no.json"], "no.json cannot be read"),
        (["--calibration", saved], "the calibration has other settings than this command"),
    ]:
        with pytest.raises(Refused) as refused:
            run(source, "-o", target, *flags)
        assert words in str(refused.value)
        assert not target.exists()


def test_other_files_are_not_calibrated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the row: no decision, other options of a question, or not a row."""
    path = tmp_path / "rows.jsonl"
    head = {"custom_id": "1", "error": None}
    chat = {**head, "response": {"status_code": 200, "body": {"choices": []}}}
    answers = [{"type": "choice", "name": "x", "probabilities": []}]
    first, other = (
        {**head, "response": {"body": {"answers": [{**answers[0], "probabilities": [
            {"value": value, "probability": 1.0}]}]}}}
        for value in "ab"
    )  # fmt: skip
    for rows, words in [
        ([chat], "rows.jsonl has no decision: pass the rows of /v1/decisions"),
        ([first, other], "`x` has the options (b) in row 2 and (a) before it"),
        ([first, 7], "line 2 is not a row"),
    ]:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert main(["calibrate", str(path), "--calibrate", "batch", "--prior", "even"]) == 1
        assert words in capsys.readouterr().err
