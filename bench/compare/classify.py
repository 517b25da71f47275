"""Labels per second of `Engine.classify`, in turns with transformers' pipelines.

    python -m bench.compare.classify out/bench/classify --texts 256

Two models of BERT-base's shape and random weights label texts (a sequence classifier) and tokens (a
token classifier). The pipeline runs in batches of 1, 8 and 32, in the order of the file and sorted
by length; the fastest of these counts. Costs are medians of rounds. Besides seconds, processor
seconds are compared, which other work on the machine affects less.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.models import make_tokenizer, words

SHAPE = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "vocab_size": 16_384,
}
LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-ORG", "I-ORG", "B-MISC", "I-MISC")
TASKS = {"Sequence": "text-classification", "Token": "token-classification"}
BATCHES = (1, 8, 32)
MEDIAN_WORDS, SPREAD, MOST_WORDS = 40, 0.9, 300


class Cost(NamedTuple):
    """Seconds and processor seconds of one run."""

    seconds: float
    cpu_seconds: float


def make_model(kind: str, folder: Path) -> None:
    """Write a random classifier of a kind, `Sequence` or `Token`, with a tokenizer."""
    import torch
    import transformers

    torch.manual_seed(0)
    labels = {"id2label": dict(enumerate(LABELS)), "label2id": {}}
    config = transformers.BertConfig(**SHAPE, **labels)
    module = getattr(transformers, f"BertFor{kind}Classification")(config)
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder, SHAPE["vocab_size"])
    module.save_pretrained(folder)


def make_texts(count: int) -> list[str]:
    """Return texts whose lengths have a heavy tail."""
    draw, vocabulary = random.Random(7), words(2_000)
    lengths = [int(draw.lognormvariate(0, SPREAD) * MEDIAN_WORDS) + 1 for _ in range(count)]
    return [" ".join(draw.choices(vocabulary, k=min(MOST_WORDS, each))) for each in lengths]


def cpu_seconds(pid: int) -> float:
    """Return the processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measured(run: Callable[[], object], pids: Sequence[int]) -> Cost:
    """Return the cost of a call in some processes."""
    began, before = time.perf_counter(), sum(map(cpu_seconds, pids))
    run()
    return Cost(time.perf_counter() - began, sum(map(cpu_seconds, pids)) - before)


def median_cost(costs: Sequence[Cost]) -> Cost:
    """Return the medians of several runs."""
    return Cost(*map(median, zip(*costs, strict=True)))


def compare(kind: str, folder: Path, texts: list[str], dtype: str, rounds: int) -> None:
    """Print the costs of both, run in turns, and their ratios."""
    import torch
    from transformers import pipeline

    from tidemill import Engine

    label: Any = pipeline(TASKS[kind], str(folder), device="cpu", dtype=getattr(torch, dtype))
    more = {"aggregation_strategy": "simple"} if kind == "Token" else {}
    orders = {"file": texts, "sorted": sorted(texts, key=len)}
    runs: dict[str, list[Cost]] = {}
    ours: list[Cost] = []
    with Engine(str(folder), device="cpu", dtype=dtype) as engine:
        pids = [os.getpid(), engine.pid]
        engine.classify(texts[:1], progress=False)
        label(texts[:1], **more)
        for _ in range(rounds):
            ours.append(measured(lambda: engine.classify(texts, progress=False), pids))
            for name, ordered in orders.items():
                for size in BATCHES:

                    def run(some: list[str] = ordered, size: int = size) -> object:
                        return label(some, batch_size=size, **more)

                    runs.setdefault(f"batch {size}, {name}", []).append(measured(run, pids))
    theirs = {key: median_cost(costs) for key, costs in runs.items()}
    for key, cost in theirs.items():
        print(f"{kind:8} pipeline, {key:16} {cost.seconds:7.2f} s {cost.cpu_seconds:7.2f} s CPU")
    best, own = min(theirs.values()), median_cost(ours)
    cheapest = min(cost.cpu_seconds for cost in theirs.values())
    print(f"{kind:8} Engine.classify           {own.seconds:7.2f} s {own.cpu_seconds:7.2f} s CPU")
    print(
        f"{kind:8} ratio to the best batch: {best.seconds / own.seconds:.2f} in time, "
        f"{cheapest / own.cpu_seconds:.2f} in processor time",
        flush=True,
    )


def main() -> None:
    """Compare both kinds of classifiers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", default=[*TASKS], choices=TASKS)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    args = parser.parse_args()
    texts = make_texts(args.texts)
    for kind in args.kinds:
        folder = args.folder / kind.lower()
        if not (folder / "model.safetensors").exists():
            make_model(kind, folder)
        compare(kind, folder, texts, args.dtype, args.rounds)


if __name__ == "__main__":
    main()
