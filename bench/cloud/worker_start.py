"""Start-up time of a worker, step by step, with its model in the bucket of an emulator.

    python -m bench.cloud.worker_start [--model out/bench/46m …] [--runs N]

A worker starts with a file waiting, and logs the steps of its start with the first row: on the
first machine, on another one that finds the first one's parity check in the bucket, and on one that
keeps weights and check. There is no network between, so the rate of the weights is the emulator's
and this disk's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from uuid import uuid4

from bench.cloud.batches import request_lines
from bench.compare.compare import machine
from localstack.cloud import Cloud
from localstack.ministack import environment_for, running_ministack
from localstack.resources import create_resources
from tidemill import demo
from tidemill.batch.object_keys import parity_prefix

MODEL = "scripted"  # the model in the lines of `request_lines`
STEPS = {
    "process_seconds": "process",
    "engine_imports_seconds": "libraries",
    "weights_seconds": "weights, concurrently",
    "engine_load_seconds": "load",
    "engine_proof_seconds": "of it proof",
    "ready_seconds": "ready at",
    "row_seconds": "first row at",
}
_WAIT_SECONDS = 600

Steps = Mapping[str, float]


def cold_start(log: str) -> Steps:
    """Return the start steps in a worker's log; raises LookupError if there are none."""
    for line in log.splitlines():
        event = json.loads(line) if line.startswith("{") else {}
        if event.get("message") == "cold start":
            return {step: float(event[step]) for step in STEPS if step in event}
    raise LookupError("the worker's log contains no cold start")


def starts(cloud: Cloud, folder: Path, model: Path, runs: int) -> dict[str, list[Steps]]:
    """Return the steps of `runs` starts of each kind, in turns; the first one is not counted."""
    name = f"weights-{uuid4().hex[:10]}"
    cloud.s3.create_bucket(Bucket=name)
    for path in model.iterdir():
        if path.is_file():
            cloud.s3.upload_file(str(path), name, f"m/{path.name}")
    found: dict[str, list[Steps]] = {"first": [], "another": [], "kept": []}
    for number in range(runs + 1):
        for kind, steps in found.items():
            place = f"{folder}/{name}" if kind == "kept" else tempfile.mkdtemp(dir=folder)
            if kind == "first":
                forget_proofs(cloud)
            places = {"TIDEMILL_CACHE": f"{place}/kept", "TIDEMILL_WEIGHTS_CACHE": f"{place}/w"}
            one = f"{name}-{kind}-{number}"
            cloud.drop(one, request_lines(8, max_tokens=16))
            flags = ("--model", f"s3://{name}/m", "--served-model-name", MODEL)
            worker = cloud.start_worker(*flags, "--exit-when-idle", "1", name=one, **places)
            cloud.wait(one, _WAIT_SECONDS)
            worker.wait(_WAIT_SECONDS)
            if number:
                steps.append(cold_start(cloud.read_log(one)))
    return found


def forget_proofs(cloud: Cloud) -> None:
    """Delete the workers' cached parity checks."""
    where = {"Bucket": cloud.resources.bucket, "Prefix": parity_prefix(MODEL)}
    for found in cloud.s3.list_objects_v2(**where).get("Contents", ()):
        cloud.s3.delete_object(Bucket=cloud.resources.bucket, Key=found["Key"])


def table(found: Iterable[tuple[str, Sequence[Steps]]]) -> str:
    """Return a markdown table of medians in seconds."""
    lines = [f"| | {' | '.join(STEPS.values())} |", f"|---|{'---:|' * len(STEPS)}"]
    for name, runs in found:
        figures = (statistics.median(run.get(step, 0.0) for run in runs) for step in STEPS)
        lines.append(f"| {name} | {' | '.join(f'{figure:.2f}' for figure in figures)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Start workers of each model and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", action="append", help="use a model folder (default: the demo model)"
    )
    parser.add_argument("--runs", type=int, default=3, help="run each N times (%(default)s)")
    given = parser.parse_args(arguments)
    load_before = os.getloadavg()[0]
    rows: list[tuple[str, Sequence[Steps]]] = []
    with tempfile.TemporaryDirectory(prefix="tidemill-bench-") as name:
        folder = Path(name)
        with running_ministack(folder) as url:
            resources = create_resources(url, prefix="tidemill", models=[MODEL])
            with Cloud(resources, environment_for(url), folder) as cloud:
                cloud.start_lambdas()
                for model in map(Path, given.model or [str(demo.MODEL_PATH)]):
                    kinds = starts(cloud, folder, model, given.runs)
                    rows += [(f"{model.name}: {kind}", runs) for kind, runs in kinds.items()]
    print(table(rows))
    print(f"\n{machine()}; load {load_before:.1f} before, {os.getloadavg()[0]:.1f} after.")


if __name__ == "__main__":
    main()
