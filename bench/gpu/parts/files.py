"""Whole files by `tidemill run`, with the seconds by cause.

*documents*: 500 of 1,500 words with 16 questions each, shuffled (`bench.workloads documents`),
random weights of Qwen3-0.6B's layers, and a KV cache of as many tokens as an 8B model would have:
about half of the documents. *decisions*: rows of 430 tokens with eight yes/no questions each.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

from bench.decisions.questions import write_file
from bench.gpu.parts.rows import MODEL, run_tidemill
from bench.gpu.parts.task import Numbers, Place, Task
from bench.models import make_model
from bench.workloads import WORKLOADS, Workload, lines_of, nothing_shared
from tidemill.offline.files.paths import card_path

SHAPE, KV_CACHE = "470m", "47G"
SECONDS_OF_DOCUMENTS, SECONDS_OF_DECISIONS = 60.0, 20.0
NUM_DECIDED_ROWS, NUM_QUESTIONS = 4000, 8
TOKENS = re.compile(r"([\d,]+) tokens in \((?:([\d,]+) cached)?.*?([\d,]+) out")
LOADED, RAN = re.compile(r"model loaded in ([\d.]+) s"), re.compile(r"rows in ([\d.]+) s")


def tasks(place: Place) -> Iterator[Task]:
    """Yield each file."""
    yield Task("documents", partial(run, place, "requests"), SECONDS_OF_DOCUMENTS)
    yield Task("decisions", partial(run, place, "decisions"), SECONDS_OF_DECISIONS)


@cache
def make_inputs(*, is_tiny: bool) -> tuple[tempfile.TemporaryDirectory[str], Path]:
    """Write the files of requests and the model, once; return the folder and the model's."""
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name)
    workload = Workload(nothing_shared(3, 20, 4)) if is_tiny else WORKLOADS["documents"]
    with (path / "requests.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines_of(workload))
    decisions = path / "decisions.jsonl"
    write_file(decisions, 2 if is_tiny else NUM_DECIDED_ROWS, NUM_QUESTIONS, "questions_first")
    if is_tiny:  # the demo model's tokenizer splits the words
        lines = map(json.loads, decisions.read_text(encoding="utf-8").splitlines())
        short = [line | {"body": line["body"] | {"state": line["custom_id"]}} for line in lines]
        decisions.write_text("".join(json.dumps(line) + "\n" for line in short), encoding="utf-8")
    if is_tiny:
        return folder, MODEL
    make_model(SHAPE, path / "model")
    return folder, path / "model"


def run(place: Place, name: str) -> Numbers:
    """Run a file, and read the summary and the card of the run."""
    folder, model = make_inputs(is_tiny=place.is_tiny)
    path = Path(folder.name)
    rows = path / f"{name}.rows.jsonl"
    command = ["run", str(path / f"{name}.jsonl"), "-o", str(rows), "--any-model"]
    command += ["--model", str(model), "--device", place.device.type]
    command += ["--kv-cache-memory", "100M" if place.is_tiny else KV_CACHE]
    started = time.perf_counter()
    output = run_tidemill(command, path)
    whole = time.perf_counter() - started
    # A file of decisions alone may have no such summary.
    read, cached, written = next(iter(TOKENS.findall(output)), ("0", "0", "0"))
    summary, ending = output.strip().splitlines()[-2:]
    [loaded], [ran] = LOADED.findall(output), RAN.findall(output)
    counts = [int(number.replace(",", "") or 0) for number in (read, cached, written)]
    card = json.loads(card_path(rows).read_text(encoding="utf-8"))
    return {
        "seconds_by_cause": card["seconds_by_cause"],
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
