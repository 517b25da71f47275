"""Peak memory for loading a model beyond its weights, ours compared with transformers' own.

    python -m bench.compare.load_memory --model out/bench/1b

Each loader runs in a separate process, which has loaded a small model before, so that imports and
compiled code do not count. Resident memory counts, private pages and mapped files alike, by the
kernel's own high-water mark. `load_model` is everything that the engine does: the first time it
checks the model against transformers' classes, after that it uses the cached result.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tidemill import demo

MEGABYTE = 1_000_000
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_HIGH_WATER = "5"
BOUND_OF_SHARD, BOUND_BYTES = 1.2, 300 * MEGABYTE
OURS, THEIRS = "tidemill", "transformers"


class Peak(NamedTuple):
    """Bytes that were resident before loading and at the peak."""

    before_bytes: int
    most_bytes: int


def load_ours(model: str) -> object:
    """Load as the engine does."""
    from tidemill.engine.config import EngineConfig
    from tidemill.engine.model.loading import load_model

    return load_model(EngineConfig(model, dtype="bfloat16", device="cpu"))


def load_theirs(model: str) -> object:
    """Load by `from_pretrained`, and run a token, since mapped files are not resident before."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    loaded(torch.zeros(1, 1, dtype=torch.long))
    return loaded


LOADERS: dict[str, Callable[[str], object]] = {OURS: load_ours, THEIRS: load_theirs}


def peak_of(load: Callable[[], object]) -> Peak:
    """Return this process's memory before a load, and its peak during it."""
    CLEAR_REFS.write_text(RESET_HIGH_WATER, encoding="ascii")
    before = _status("VmRSS")
    loaded = load()
    most = _status("VmHWM")
    del loaded
    return Peak(before, most)


def measure(loader: str, model: Path, cache: str) -> Peak:
    """Load in another process, with the cache folder `cache`."""
    command = [
        sys.executable,
        "-m",
        "bench.compare.load_memory",
        "--model",
        str(model),
        "--in",
        loader,
    ]
    environment = {**os.environ, "TIDEMILL_CACHE": cache}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return Peak(*json.loads(done.stdout.splitlines()[-1]))


def show(model: Path) -> None:
    """Print the table."""
    shards = [path.stat().st_size for path in model.glob("*.safetensors")]
    bound = BOUND_OF_SHARD * max(shards) + BOUND_BYTES
    print(
        f"{sum(shards) / MEGABYTE:,.0f} MB of weights in {len(shards)} shards of at most "
        f"{max(shards) / MEGABYTE:,.0f} MB; bound: {bound / MEGABYTE:,.0f} MB beyond the weights."
    )
    print("| loader | at most beyond the weights, MB | of the bound |\n|---|---:|---:|")
    with tempfile.TemporaryDirectory(prefix="tidemill-bench-") as cache:
        for name, loader in (
            ("tidemill, first load: with its proof", OURS),
            ("tidemill", OURS),
            ("transformers' from_pretrained", THEIRS),
        ):
            peak = measure(loader, model, cache)
            beyond = peak.most_bytes - peak.before_bytes - sum(shards)
            print(f"| {name} | {beyond / MEGABYTE:,.0f} | {beyond / bound:.2f} |", flush=True)


def _status(name: str) -> int:
    lines = STATUS.read_text(encoding="ascii").splitlines()
    [found] = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return int(found) * 1024


def main() -> None:
    """Compare the loaders, or run one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="load this model folder")
    parser.add_argument("--in", dest="loader", choices=LOADERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.loader is None:
        show(arguments.model)
        return
    load = LOADERS[arguments.loader]
    load(str(demo.MODEL_PATH))
    print(json.dumps(peak_of(lambda: load(str(arguments.model)))))


if __name__ == "__main__":
    main()
