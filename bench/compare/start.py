"""Start-up time: from launch to a loaded model, to the first row, to the exit.

    python -m bench.compare.start [--model out/bench/46m …] [--runs N]

`tidemill run` with eight short lines, as a user types it: with a filled cache (warm), without
(cold), and as the first on a machine, which also compiles the CPU's kernels. It is compared with
`import torch` alone, below which no start can come, and transformers' own load of the same model
with one short answer. All take turns; every tidemill run has its own caches.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.compare.compare import machine
from bench.processes import Marks, Measured, measure
from tidemill import demo

READY, ROW = "model loaded", '"custom_id"'
NUM_LINES = 8
NUM_TOKENS = 16
_TORCH = f"import torch; print('{READY}', '{ROW}')"
_TRANSFORMERS = f"""
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print('{READY}', flush=True)
ids = tokenizer("What is the capital of France?", return_tensors="pt").input_ids
model.generate(ids, max_new_tokens={NUM_TOKENS}, do_sample=False)
print('{ROW}')
"""


@dataclass(frozen=True, slots=True)
class Start:
    """One kind of start: its command, and a function that creates its environment for each run."""

    name: str
    command: list[str]
    environment: Callable[[], Mapping[str, str]]
    is_once: bool = False


def starts(models: Sequence[str], folder: Path) -> list[Start]:
    """Return all commands to compare; files kept between runs are under `folder`."""
    requests = folder / "requests.jsonl"
    requests.write_text("".join(_line(number) for number in range(NUM_LINES)), encoding="utf-8")

    def new_folder() -> str:
        return tempfile.mkdtemp(dir=folder)

    shared = {"NUMBA_CACHE_DIR": f"{folder}/kernels", "PYTHONDONTWRITEBYTECODE": ""}
    found: list[Start] = [Start("`import torch`", [sys.executable, "-c", _TORCH], dict)]
    for model in models:
        name = "demo" if Path(model).samefile(demo.MODEL_PATH) else Path(model).name
        ours = [sys.executable, "-m", "tidemill", "run", "--model", model, "--any-model"]
        ours += ["-i", str(requests), "-o", "-"]
        found += [
            Start(
                f"{name}: tidemill, first on a machine",
                ours,
                lambda: {**shared, "TIDEMILL_CACHE": new_folder(), "NUMBA_CACHE_DIR": new_folder()},
                is_once=True,
            ),
            Start(
                f"{name}: tidemill, cold", ours, lambda: {**shared, "TIDEMILL_CACHE": new_folder()}
            ),
            Start(
                f"{name}: tidemill, warm",
                ours,
                lambda: {**shared, "TIDEMILL_CACHE": f"{folder}/remembered"},
            ),
            Start(f"{name}: transformers", [sys.executable, "-c", _TRANSFORMERS, model], dict),
        ]
    return found


def _line(number: int) -> str:
    body = {
        "model": "any",
        "messages": [{"role": "user", "content": f"What is the capital of country {number}?"}],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
    }
    return (
        json.dumps({"custom_id": str(number), "url": "/v1/chat/completions", "body": body}) + "\n"
    )


def run(compared: Sequence[Start], runs: int, folder: Path) -> dict[str, list[Measured]]:
    """Return the times of each start, by name, in turns; a round before them fills the caches."""
    found: dict[str, list[Measured]] = {start.name: [] for start in compared}
    for number in range(runs + 1):
        for start in compared:
            if start.is_once and number != 1:
                continue
            marks = Marks(READY, ROW)
            measured = measure(start.command, start.environment(), marks, folder / "log")
            if number:
                found[start.name].append(measured)
    return found


def table(found: Mapping[str, Sequence[Measured]]) -> str:
    """Return a markdown table of medians and ranges in seconds from launch."""
    columns: list[tuple[str, Callable[[Measured], float]]] = [
        ("model loaded", lambda one: one.ready_seconds),
        ("first row", lambda one: one.ready_seconds + one.steady_seconds),
        ("exit", lambda one: one.whole_seconds),
    ]
    lines = ["| |" + "".join(f" {title}, s |" for title, _ in columns), "|---|" + "---:|" * 3]
    for name, runs in found.items():
        figures = [[figure(one) for one in runs] for _, figure in columns]
        lines.append(f"| {name} | {' | '.join(map(_median, figures))} |")
    return "\n".join(lines)


def _median(seconds: Sequence[float]) -> str:
    middle = f"{statistics.median(seconds):.2f}"
    return middle if len(seconds) == 1 else f"{middle} ({min(seconds):.2f}–{max(seconds):.2f})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all starts in turns and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", action="append", help="use a model folder (default: the demo model)"
    )
    parser.add_argument("--runs", type=int, default=5, help="run each N times (%(default)s)")
    given = parser.parse_args(arguments)
    models = given.model or [str(demo.MODEL_PATH)]
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="tidemill-bench-") as folder:
        print(table(run(starts(models, Path(folder)), given.runs, Path(folder))))
    print(f"\n{machine()}; load {load_before:.1f} before, {os.getloadavg()[0]:.1f} after.")


if __name__ == "__main__":
    main()
