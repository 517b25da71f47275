"""Import time of a Lambda's cold start, from the real bundle, with byte code and without.

    python -m bench.cloud.cold_start [--runs N]

Each import runs in a separate process that finds nothing but the bundle. For comparison there is
the cost of every Lambda in Python that calls AWS: `import boto3` and a client.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from infra.bundle import build, host_processor
from infra.pip_target import python_version

_HANDLERS = ("control", "reaper", "dead_letters", "api")
_PEER = "import boto3; boto3.client('dynamodb', region_name='us-east-1')"
_TIMED = """\
import sys, time
sys.dont_write_bytecode = True
sys.path.insert(0, sys.argv[1])
started = time.perf_counter()
{statement}
print(time.perf_counter() - started)
"""


def import_seconds(bundle: Path, statement: str) -> float:
    """Return the seconds that a statement takes in a fresh process with this bundle alone."""
    script = _TIMED.format(statement=statement)
    command = [sys.executable, "-I", "-S", "-c", script, str(bundle)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(output)


def medians(bundle: Path, runs: int) -> dict[str, float]:
    """Return the median seconds by name, the runs of all of them taken in turn."""
    statements = {name: f"import tidemill.handler.lambdas.{name}" for name in _HANDLERS}
    statements["boto3 and one client"] = _PEER
    seconds: dict[str, list[float]] = {name: [] for name in statements}
    for _ in range(runs):
        for name, statement in statements.items():
            seconds[name].append(import_seconds(bundle, statement))
    return {name: statistics.median(found) for name, found in seconds.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each import: milliseconds with byte code, without, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9)
    runs = parser.parse_args(arguments).runs
    bundle = build(host_processor(), python=python_version())
    size = sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file())
    print(f"bundle: {size / 2**20:.1f} MiB")
    with tempfile.TemporaryDirectory() as folder:
        bare = Path(folder) / "bare"
        shutil.copytree(bundle, bare, ignore=shutil.ignore_patterns("__pycache__"))
        compiled, uncompiled = medians(bundle, runs), medians(bare, runs)
    for name, seconds in compiled.items():
        without = uncompiled[name]
        print(
            f"{name:22} {seconds * 1000:6.0f} ms, without byte code {without * 1000:6.0f} ms, "
            f"{without / seconds:.1f} ×"
        )


if __name__ == "__main__":
    main()
