"""A file that is sorted by question, through a worker that owns few shards and one that owns many.

    python -m bench.cloud.prefetch [--model out/bench/46m] [--runs N]

Each of eight questions is asked about 200 documents of 800 words, so that a document comes again
behind 199 others, more than wait in the engine or fit into its KV cache; shards have 64 lines.
*Prefilled* are the tokens of prompts that the prefix cache did not have.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from bench.compare.compare import machine
from bench.workloads import Request, Texts, Workload, line_of
from localstack.cloud import Cloud
from localstack.ministack import environment_for, running_ministack
from localstack.resources import create_resources

MODEL = "46m"
NUM_DOCUMENTS, DOCUMENT_WORDS, NUM_QUESTIONS = 200, 800, 8
SHARD_LINES = 64
MAX_SHARDS = (3, 32)
LIMITS = ("--dtype", "bfloat16", "--max-num-seqs", "32", "--kv-cache-memory", "160M")
_WAIT_SECONDS = 3600


class Run(NamedTuple):
    """Seconds that a batch was in progress, and tokens of its prompts that were computed."""

    seconds: float
    prefilled: int


def file_by_question() -> bytes:
    """Return the file; an answer has 16 tokens."""
    texts = Texts()
    documents = [texts(DOCUMENT_WORDS) for _ in range(NUM_DOCUMENTS)]
    requests = [
        Request(f"{document}\n{question}", 16)
        for question in (texts(20) for _ in range(NUM_QUESTIONS))
        for document in documents
    ]
    workload = Workload(lambda _: requests, MODEL)
    lines = (line_of(workload, *numbered) for numbered in enumerate(requests))
    return "".join(f"{line}\n" for line in lines).encode()


def run(cloud: Cloud, model: Path, lines: bytes, max_shards: int, name: str) -> Run:
    """Return what a file takes a worker that owns so many shards at most."""
    cloud.drop(name, lines)
    served = ("--model", str(model), "--served-model-name", MODEL, "--max-shards", str(max_shards))
    worker = cloud.start_worker(*served, *LIMITS, "--exit-when-idle", "1", name=name)
    report = cloud.wait(name, _WAIT_SECONDS)
    worker.wait(_WAIT_SECONDS)
    assert report["request_counts"]["completed"] == NUM_DOCUMENTS * NUM_QUESTIONS
    usage = report["usage"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    return Run(report["tidemill"]["seconds"], usage["input_tokens"] - cached)


def table(found: Mapping[int, Sequence[Run]]) -> Iterator[str]:
    """Yield the lines of a table of medians."""
    yield "| shards owned | seconds | of few | prefilled |"
    yield "|---:|---:|---:|---:|"
    few = statistics.median(run.seconds for run in found[MAX_SHARDS[0]])
    for max_shards, runs in found.items():
        seconds = statistics.median(run.seconds for run in runs)
        prefilled = statistics.median(run.prefilled for run in runs)
        yield f"| {max_shards} | {seconds:.0f} | {few / seconds:.2f} × | {prefilled:,.0f} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the file both ways in turns and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("out/bench/46m"))
    parser.add_argument("--runs", type=int, default=3, help="runs of each (%(default)s)")
    given = parser.parse_args(arguments)
    load_before = os.getloadavg()[0]
    lines, found = file_by_question(), defaultdict[int, list[Run]](list)
    with (
        tempfile.TemporaryDirectory(prefix="tidemill-bench-") as folder,
        running_ministack(Path(folder)) as url,
    ):
        resources = create_resources(url, prefix="tidemill", models=[MODEL])
        environment = environment_for(url) | {"TIDEMILL_SHARD_LINES": str(SHARD_LINES)}
        with Cloud(resources, environment, Path(folder)) as cloud:
            cloud.start_lambdas()
            for number, max_shards in product(range(given.runs), MAX_SHARDS):
                name = f"{max_shards}-{number}"
                found[max_shards].append(run(cloud, given.model, lines, max_shards, name))
    print("\n".join(table(found)))
    print(f"\n{machine()}; load {load_before:.1f} before, {os.getloadavg()[0]:.1f} after.")


if __name__ == "__main__":
    main()
