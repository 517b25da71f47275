"""Print requests with their answers, or a table of results.

python examples/show.py requests.jsonl rows.jsonl
python examples/show.py messages.output.csv
"""

from __future__ import annotations

import csv
import json
import struct
import sys
from base64 import b64decode
from pathlib import Path
from typing import Any

PROMPT_FIELDS = ("prompt", "input", "query", "queries", "text_1", "data_1", "file_url")
SHOWN_NUMBERS = 3
SHOWN_CHARS = 100
CELL_CHARS = 60
HIDDEN_COLUMNS = {"id", "text", "finish_reason", "usage", "error"}


def prompt_of(body: dict[str, Any]) -> str:
    """Return the last message of a chat, or the prompt of another request."""
    if body.get("messages"):
        return str(body["messages"][-1]["content"])
    prompt = str(next((body[name] for name in PROMPT_FIELDS if name in body), body))
    return prompt if len(prompt) <= SHOWN_CHARS else f"{prompt[:SHOWN_CHARS]}…"


def answered(row: dict[str, Any]) -> list[str]:
    """Return the lines of a row's answer: texts, shortened vectors, scores or an error."""
    if row["response"] is None:
        return [f"failed: {row['error']['message']}"]
    body = row["response"]["body"]
    if "error" in body:
        return [f"failed with {row['response']['status_code']}: {body['error']['message']}"]
    if "choices" in body:
        return [
            choice["message"]["content"] if "message" in choice else choice["text"]
            for choice in body["choices"]
        ]
    if "results" in body:
        return [
            f"{result['relevance_score']:.3f}  {place_of(result)}" for result in body["results"]
        ]
    if "data" in body:
        return [
            f"{one['score']:.3f}" if "score" in one else in_short(one["embedding"])
            for one in body["data"]
        ]
    return [body["text"]]


def in_short(vector: list[float] | str) -> str:
    """Return the first numbers of a vector and its number of dimensions."""
    numbers = vector
    if isinstance(numbers, str):
        data = b64decode(numbers)
        numbers = list(struct.unpack(f"<{len(data) // 4}f", data))
    first = ", ".join(f"{number:.4f}" for number in numbers[:SHOWN_NUMBERS])
    return f"[{first}, …] of {len(numbers):,} dimensions"


def place_of(result: dict[str, Any]) -> str:
    """Return the text of a ranked document, or its number if the row has no texts."""
    return str(result.get("document", {}).get("text", f"document {result['index']}"))


def records(path: str) -> list[dict[str, Any]]:
    """Read a JSONL file."""
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line.strip()]


def table(path: str) -> list[str]:
    """Return the lines of a CSV of results, with cut cells and without the engine's columns."""
    with Path(path).open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    shown = [place for place, name in enumerate(rows[0]) if name not in HIDDEN_COLUMNS]
    cells = [[cell(row[place]) for place in shown] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def cell(text: str) -> str:
    """Return a cell on one line, shortened in its middle if it is long."""
    text = " ".join(text.split())
    half = CELL_CHARS // 2
    return text if len(text) <= CELL_CHARS else f"{text[: half - 1]}…{text[-half:]}"


def main() -> None:
    """Print the rows with their lines, which are in the same order, or a table."""
    if len(sys.argv) == 2:
        print("\n".join(table(sys.argv[1])))
        return
    requests, rows = (records(path) for path in sys.argv[1:3])
    for request, row in zip(requests, rows, strict=True):
        print(prompt_of(request["body"]))
        for text in answered(row):
            print("  → " + text.strip().replace("\n", "\n    "))


if __name__ == "__main__":
    main()
