"""Helpers for tests of runs: request lines, rows and answers of a server."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidemill.offline.files.paths import spool_path

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


def line(custom_id: str, **body: Any) -> str:
    """Return one line of a batch file whose body is the script for the engine."""
    body = {"messages": HI, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body})


def rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, each of which must be strict JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in a row")

    data = path.read_bytes()
    assert data == b"" or data.endswith(b"\n")
    return [json.loads(row, parse_constant=refuse) for row in data.split(b"\n")[:-1]]


def wait_for_rows(path: Path, count: int) -> None:
    """Return once the file has that many rows."""
    deadline = time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline, "the rows did not come"
        time.sleep(0.01)


def durable_ids(out: Path) -> set[str]:
    """Return the ids of the rows that outlive a kill."""
    paths = [path for path in (out, spool_path(out)) if path.exists()]
    records = [record for path in paths for record in path.read_bytes().splitlines(keepends=True)]
    whole = [record for record in records if record.endswith(b"\n")]
    return {json.loads(record.rpartition(b"\t")[2])["id"] for record in whole}


@dataclass
class Answer:
    """The server's reaction to one request: a status and a body, or a fault."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    hang: bool = False
    claimed_length: int | None = None
