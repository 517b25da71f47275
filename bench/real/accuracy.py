"""Correct fields in the rows of r3, of each program that wrote some.

    python -m bench.real.accuracy out/bench/real/rows/r3-*.jsonl

The first 60 messages have 180 fields. A row without its fields, or without JSON, has none correct.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Final

from bench.real.files import NUM_MESSAGES
from bench.real.messages import count_right, make_messages

NUM_SCORED: Final = 60


def num_right(rows: list[dict[str, Any]], num_messages: int) -> int:
    """Return how many fields of the first messages are correct in the rows of the file."""
    answers = {row["custom_id"]: _answer(row) for row in rows}
    return sum(
        count_right(message.fields, answers.get(f"line-{number}"))
        for number, message in enumerate(make_messages(num_messages))
    )


def _answer(row: dict[str, Any]) -> object:
    try:
        return json.loads(row["response"]["body"]["choices"][0]["message"]["content"])
    except (KeyError, TypeError, ValueError):
        return None


def main() -> None:
    """Print a line for each file of rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path, nargs="+")
    for path in parser.parse_args().rows:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        counts = (
            f"{num_right(rows, num):,} of {3 * num:,} fields" for num in (NUM_SCORED, NUM_MESSAGES)
        )
        print(f"{path.stem}: {', '.join(counts)}")


if __name__ == "__main__":
    main()
