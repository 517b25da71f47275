"""Prints what was asked and what came back: python examples/show.py requests.jsonl rows.jsonl."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def asked(body: dict[str, Any]) -> str:
    """Return what the last message of a chat says, or the prompt of a completion."""
    return str(body["messages"][-1]["content"] if "messages" in body else body["prompt"])


def answered(row: dict[str, Any]) -> list[str]:
    """Return the text of every choice, or the one message of a row that failed."""
    if row["response"] is None:
        return [f"failed: {row['error']['message']}"]
    body = row["response"]["body"]
    if "error" in body:
        return [f"failed with {row['response']['status_code']}: {body['error']['message']}"]
    return [
        choice["message"]["content"] if "message" in choice else choice["text"]
        for choice in body["choices"]
    ]


def records(path: str) -> list[dict[str, Any]]:
    """Read a JSONL file."""
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line.strip()]


def main() -> None:
    """Print the rows beside their lines, which come in the same order."""
    requests, rows = (records(path) for path in sys.argv[1:3])
    for request, row in zip(requests, rows, strict=True):
        print(asked(request["body"]))
        for text in answered(row):
            print("  → " + text.strip().replace("\n", "\n    "))


if __name__ == "__main__":
    main()
