"""Example files run as a person runs them, and what comes of each line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def lines_of(name: str | Path) -> list[dict[str, Any]]:
    """Return the lines of an example file, or of another one by its path."""
    return [json.loads(line) for line in (EXAMPLES / name).read_text().splitlines()]


def bodies_of(name: str | Path, model: Path, served: str, folder: Path) -> dict[str, Any]:
    """Run an example file and return each row's body by its custom id."""
    output = folder / f"{Path(name).name}.rows"
    flags = ["--model", str(model), "--served-model-name", served, "--dtype", "float32"]
    subprocess.run(
        [sys.executable, "-m", "tidemill", "run", "-i", EXAMPLES / name, "-o", output, *flags],
        cwd=ROOT,
        check=True,
    )
    rows = [json.loads(row) for row in output.read_text().splitlines()]
    assert [row["custom_id"] for row in rows] == [line["custom_id"] for line in lines_of(name)]
    return {row["custom_id"]: row["response"]["body"] for row in rows}
