"""A whole file by `tidemill run`, in the order of the plan and in that of arrival.

500 documents of 1,500 words with 16 questions each, shuffled (`bench.workloads documents`), random
weights of Qwen3-0.6B's layers, and a KV cache of as many tokens as an 8B model would have: about
half of the documents.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

from bench.gpu.parts.rows import MODEL, run_tidemill
from bench.gpu.parts.task import Numbers, Place, Task
from bench.models import make_model
from bench.workloads import WORKLOADS, Workload, lines_of, nothing_shared

SHAPE, KV_CACHE = "470m", "47G"
USUAL_SECONDS = 60.0
TOKENS = re.compile(r"([\d,]+) tokens in \((?:([\d,]+) cached)?.*?([\d,]+) out")
LOADED, RAN = re.compile(r"model loaded in ([\d.]+) s"), re.compile(r"rows in ([\d.]+) s")


def tasks(place: Place) -> Iterator[Task]:
    """Yield a run in each order."""
    for name, flags in (("plan", ()), ("arrival", ("--no-plan",))):
        yield Task(f"documents, {name}", partial(run, place, flags), USUAL_SECONDS)


@cache
def make_inputs(*, is_tiny: bool) -> tuple[tempfile.TemporaryDirectory[str], Path]:
    """Write the file of requests and the model, once; return the folder and the model's."""
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name)
    workload = Workload(nothing_shared(3, 20, 4)) if is_tiny else WORKLOADS["documents"]
    with (path / "requests.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines_of(workload))
    if is_tiny:
        return folder, MODEL
    make_model(SHAPE, path / "model")
    return folder, path / "model"


def run(place: Place, flags: tuple[str, ...]) -> Numbers:
    """Run the file, and parse the summary at the end of the run."""
    folder, model = make_inputs(is_tiny=place.is_tiny)
    path = Path(folder.name)
    rows = path / f"rows{len(flags)}.jsonl"
    command = ["run", str(path / "requests.jsonl"), "-o", str(rows), "--any-model", *flags]
    command += ["--model", str(model), "--device", place.device.type]
    command += ["--kv-cache-memory", "100M" if place.is_tiny else KV_CACHE]
    started = time.perf_counter()
    output = run_tidemill(command, path)
    whole = time.perf_counter() - started
    [(read, cached, written)] = TOKENS.findall(output)
    summary, ending = output.strip().splitlines()[-2:]
    [loaded], [ran] = LOADED.findall(output), RAN.findall(output)
    counts = [int(number.replace(",", "") or 0) for number in (read, cached, written)]
    return {
        "rows": sum(1 for _ in rows.open("rb")),
        "run_seconds": float(ran),
        "load_seconds": float(loaded),
        "whole_seconds": whole,
        "prefilled": counts[0] - counts[1],
        "prompt_tokens": counts[0],
        "outputs_per_second": counts[2] / float(ran),
        "said": summary,
        **json.loads(ending),
    }
