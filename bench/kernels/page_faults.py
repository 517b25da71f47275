"""Page faults of a run: how much fresh memory the engine touches, per step and in total.

    python -m bench.kernels.page_faults out/bench/46m [--file base] [--rows 64] [--runs 3] \
        [--with GLIBC_TUNABLES= THP_MEM_ALLOC_ENABLE=1 …]

Each run is a separate process, and all variants run in turns: the plain one, and one for each
`--with`, which sets environment variables (several, separated by commas). An empty `GLIBC_TUNABLES`
leaves glibc's defaults (`engine/heap_trim.py`). Faults are exact on a busy machine; seconds need a
quiet one. A fault takes 4 KiB of memory, or 2 MiB with huge pages.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import NamedTuple

from bench.compare.compare import machine
from bench.workloads import lines
from tidemill.engine.config import EngineConfig
from tidemill.engine.load import load_served

PLAIN = "plain"


class Cost(NamedTuple):
    """Cost of a run's rows, and the faults of loading the model."""

    loading_faults: int
    faults: int
    steps: int
    system_seconds: float
    user_seconds: float
    seconds: float
    resident_mib: float


def run(config: EngineConfig, file: str, num_rows: int, max_tokens: int | None) -> Cost:
    """Run the first rows of a file in this process, with answers of at most `max_tokens`."""
    requests = [json.loads(line) for line in itertools.islice(lines(file), num_rows)]
    for request in requests:
        body = request["body"]
        del body["model"]
        body["max_tokens"] = min(body["max_tokens"], max_tokens or body["max_tokens"])
    started = resource.getrusage(resource.RUSAGE_SELF)
    with closing(load_served(config)) as served:

        async def run_all() -> None:
            replies = await asyncio.gather(
                *(served.respond(one["url"], one["body"], one["custom_id"], 0) for one in requests)
            )
            assert {reply.status_code for reply in replies} == {200}, replies[0]

        before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        steps = served.stats().steps
        asyncio.run(run_all())
        seconds = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_SELF)
        steps = served.stats().steps - steps
    return Cost(
        before.ru_minflt - started.ru_minflt,
        after.ru_minflt - before.ru_minflt,
        steps,
        after.ru_stime - before.ru_stime,
        after.ru_utime - before.ru_utime,
        seconds,
        after.ru_maxrss / 1024,
    )


def run_apart(arguments: Sequence[str], environment: Mapping[str, str]) -> Cost:
    """Run in a separate process with some environment variables."""
    command = [sys.executable, "-m", __spec__.name, *arguments, "--child"]
    done = subprocess.run(
        command, env={**os.environ, **environment}, check=True, stdout=subprocess.PIPE, text=True
    )
    return Cost(*json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Measure, and print a table of medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="use this folder of a model")
    parser.add_argument("--file", default="base", help="run this workload (%(default)s)")
    parser.add_argument("--rows", type=int, default=64, help="run its first N rows (%(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="run each N times (%(default)s)")
    parser.add_argument("--max-tokens", type=int, help="cut answers at N tokens")
    parser.add_argument("--dtype", default="bfloat16", help="use this dtype (%(default)s)")
    parser.add_argument(
        "--with", dest="variants", nargs="*", default=[], help="also run with NAME=VALUE[,…]"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        config = EngineConfig(given.model, dtype=given.dtype, device="cpu")
        print(json.dumps(run(config, given.file, given.rows, given.max_tokens)))
        return
    own = [given.model, "--file", given.file, "--rows", str(given.rows), "--dtype", given.dtype]
    own += [] if given.max_tokens is None else ["--max-tokens", str(given.max_tokens)]
    costs: dict[str, list[Cost]] = {name: [] for name in (PLAIN, *given.variants)}
    for _ in range(given.runs):
        for name, of_variant in costs.items():
            pairs = [] if name == PLAIN else [pair.split("=", 1) for pair in name.split(",")]
            of_variant.append(run_apart(own, dict(pairs)))
            print(name, *of_variant[-1], flush=True)
    print(f"\n{given.file}, {given.rows} rows\n")
    print(
        "| variant | faults while loading | in the run | per step | system s | user s | s | MiB |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name, of_variant in costs.items():
        cost = Cost(*(statistics.median(column) for column in zip(*of_variant, strict=True)))
        numbers = (cost.loading_faults, cost.faults, cost.faults / cost.steps)
        seconds = (cost.system_seconds, cost.user_seconds, cost.seconds)
        print(
            f"| {name} | {' | '.join(f'{number:,.0f}' for number in numbers)} | "
            f"{' | '.join(f'{each:.2f}' for each in seconds)} | {cost.resident_mib:,.0f} |"
        )
    print(machine() + ".")


if __name__ == "__main__":
    main()
