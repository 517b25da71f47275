"""Choices of tiles for kernels that have none for this card, as far as there is time."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from bench.gpu.choose import TRIED, Results, choose_all
from bench.gpu.parts.task import Numbers, Place, Task

# Models, and kernels of theirs whose choices were never timed.
WORK = {
    "Qwen3-0.6B": ("attention_narrow", "attention_wide"),
    "Llama-3-8B": ("attention_narrow", "attention_wide"),
}
FEWEST_SECONDS = 20.0


def tasks(place: Place) -> Iterator[Task]:
    """Yield each model's kernels."""
    for number, model in enumerate(WORK):
        yield Task(model, partial(choose, place, model, len(WORK) - number), FEWEST_SECONDS)


def choose(place: Place, model: str, num_left: int) -> Numbers:
    """Return the better choices of a model's kernels, within its share of the time."""
    if place.is_tiny:
        return {"skipped": "interpreted kernels have no choices"}
    with tempfile.TemporaryDirectory() as folder:
        results = Results(Path(folder))
        seconds = (place.until - time.monotonic()) / num_left
        choose_all(
            [model], WORK[model], torch.bfloat16, place.device, results=results, seconds=seconds
        )
        tried_file = Path(folder) / TRIED
        tried = tried_file.read_text(encoding="utf-8").splitlines() if tried_file.exists() else []
        chosen = json.loads(results.file.read_text(encoding="utf-8"))
    records = list(map(json.loads, tried))
    better = sum(record["is_better"] for record in records)
    return {
        "summary": f"{better} of {len(records)} have a better choice",
        "tried": records,
        "chosen": {kernel: chosen[kernel] for kernel in WORK[model]},
    }
