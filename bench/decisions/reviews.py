"""Decisions about film reviews with human ratings: accuracy and ranking, before and after a fit.

    python -m bench.decisions.reviews movieReviewSnippets_GroundTruth.txt MODEL [--rows 300]

The ratings (−4 to 4, Hutto and Gilbert 2014) are in the source package of vaderSentiment 3.3.2.
Reviews rated beyond ±0.5 are drawn at random (seed 0). Every read is a run of a table; its output
is calibrated twice. Prints a table.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

YES = "good: Is this film review positive?"
CHOICE = "good = {}: What is the sentiment of this film review?"
FIRST, SECOND = CHOICE.format("positive|negative"), CHOICE.format("negative|positive")
ROW, QUESTIONS = (["--question-layout", layout] for layout in ("row_first", "questions_first"))
READS = {
    "yes or no, row first": [YES, *ROW],
    "yes or no, questions first": [YES, *QUESTIONS],
    "choice, A is positive": [FIRST, *ROW],
    "choice, A is negative": [SECOND, *ROW],
    "choice, two orders, row first": [FIRST, *ROW, "--permutations", "2"],
    "choice, two orders, questions first": [FIRST, *QUESTIONS, "--permutations", "2"],
}
_REPORT = re.compile(r"accuracy ([\d.]+)% before, ([\d.]+)% after; .* error ([\d.]+) .*, ([\d.]+)")


def write_table(ratings: Path, table: Path, num_rows: int) -> None:
    """Write the reviews, with their sentiment in the forms of both kinds of questions."""
    lines = ratings.read_text(encoding="latin-1").splitlines()
    rows = [line.split("\t", 2) for line in lines]
    random.Random(0).shuffle(rows)
    chosen = [row for row in rows if abs(float(row[1])) > 1 / 2][:num_rows]
    with table.open("w", encoding="utf-8", newline="") as sink:
        writer = csv.writer(sink)
        writer.writerow(["id", "review", "yes", "sentiment"])
        for number, rating, text in chosen:
            is_good = float(rating) > 0
            sentiment = "positive" if is_good else "negative"
            writer.writerow([number, text, "yes" if is_good else "no", sentiment])


def area(shares: list[float], is_good: list[bool]) -> float:
    """Return the area under the ROC curve, by ranks."""
    ranked = sorted(zip(shares, is_good, strict=True))
    good = sum(is_good)
    ranks = sum(rank for rank, (_, one) in enumerate(ranked, 1) if one)
    return (ranks - good * (good + 1) / 2) / (good * (len(is_good) - good))


def main() -> None:
    """Run all reads, and print a row for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ratings", type=Path, help="read the ratings from this file")
    parser.add_argument("model", help="use this model")
    parser.add_argument("--rows", type=int, default=300, help="run N reviews (%(default)s)")
    arguments = parser.parse_args()
    print("| read | accuracy | `batch` | `platt` | AUC | ECE before, after `platt` |")
    print("|---|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory(prefix="tidemill-bench-") as name:
        table = Path(name) / "reviews.csv"
        write_table(arguments.ratings, table, arguments.rows)
        for read, flags in READS.items():
            print(f"| {read} | {row_of(table, arguments.model, flags)} |", flush=True)


def row_of(table: Path, model: str, flags: list[str]) -> str:
    """Run a read and calibrate its output; return the cells of its row."""
    gold = "yes" if flags[0] == YES else "sentiment"
    output = table.with_name("reviews.output.csv")
    output.unlink(missing_ok=True)
    question = ["--prompt", "{{ review }}", "--id", "id", "--ask", *flags]
    _tidemill("run", str(table), *question, "--model", model, "--max-model-len", "2048", "--force")
    with output.open(encoding="utf-8", newline="") as source:
        rows = list(csv.DictReader(source))
    shares = [json.loads(row["good_probabilities"]) for row in rows]
    good = [share["true" if gold == "yes" else "positive"] for share in shares]
    cells = [
        _tidemill(
            "calibrate", str(output), "--gold", gold, "--calibrate", "batch", "--prior", "even"
        )
    ]
    cells += [_tidemill("calibrate", str(output), "--gold", gold)]
    batch, platt = (_REPORT.search(cell) for cell in cells)
    assert batch is not None
    assert platt is not None
    accuracies = [float(each) / 100 for each in (batch[1], batch[2], platt[2])]
    figures = [*accuracies, area(good, [row[gold] in {"yes", "positive"} for row in rows])]
    return " | ".join([*(f"{each:.2f}" for each in figures), f"{platt[3]}, {platt[4]}"])


def _tidemill(*words: str) -> str:
    """Run a command; return its output."""
    command = [sys.executable, "-m", "tidemill.cli.main", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout + done.stderr


if __name__ == "__main__":
    main()
