"""Families by the engine's own decoder, compared with transformers' classes in the same engine.

    python -m bench.compare.families out/bench/d.jsonl [--families Olmo2Config,…] [--rows 64]

Each family has a random bf16 model of 12 layers, 512 wide, mixtures of 8 experts of which tokens
choose 2; "GptOssConfig mxfp4" has its experts in gpt-oss' published format. Both run the prompts of
a file's first rows, with the same lengths and token limits, each in a process of one thread.
Figures are processor seconds from the first step to the last, on which other work on the machine
has less influence.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.models import SHAPES
from tests.engine.families import FAMILIES, ONLY_OURS, config_fields
from tests.engine.model.weights.quantised.checkpoints import quantise_mxfp4
from tidemill.engine.config import EngineConfig

SHAPE: dict[str, Any] = {**SHAPES["46m"], "max_position_embeddings": 4096}
# Larger sizes than in the tests' tiny models, for fields that they have.
LARGER: dict[str, Any] = {
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "sliding_window": 512,
    "ffn_dim": 1536,
    "n_positions": 4096,
    "num_kv_heads": 4,
    "v_head_dim": 48,
}
WORDS_TO_TOKENS = 1.1
OURS, THEIRS = "own", "transformers"
MXFP4 = " mxfp4"


def make_model(title: str, folder: Path) -> None:
    """Save a family's random model."""
    import torch
    import transformers

    name = title.removesuffix(MXFP4)
    differs = FAMILIES[name]
    larger = {key: value for key, value in LARGER.items() if key in differs}
    fields = config_fields(name, differs | SHAPE | larger)
    torch.manual_seed(0)
    config = getattr(transformers, name)(**fields)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    if title.endswith(MXFP4):
        quantise_mxfp4(folder)


def requests_of(file: Path, rows: int) -> list[tuple[int, int]]:
    """Return the token counts of the first rows' prompts and answers."""
    with file.open(encoding="utf-8") as lines:
        bodies = [json.loads(line)["body"] for line, _ in zip(lines, range(rows), strict=False)]
    return [
        (
            int(
                WORDS_TO_TOKENS
                * sum(len(message["content"].split()) for message in body["messages"])
            ),
            body["max_tokens"],
        )
        for body in bodies
    ]


def run_one(folder: Path, file: Path, rows: int, dtype: Any) -> float:
    """Return the processor seconds of all requests."""
    import numpy as np

    from tidemill.engine.loop.assembly import make_core
    from tidemill.engine.model.loading import load_model
    from tidemill.engine.model.network.kv_cache_size import compute_kv_cache_size
    from tidemill.engine.scheduling.sequence import Sampling, SequenceRequest

    config = EngineConfig(str(folder), dtype=dtype, device="cpu", max_model_len=2048)
    model = load_model(config)
    core = make_core(model, compute_kv_cache_size(model, config), config)
    random = np.random.default_rng(0)
    running = []
    for length, max_tokens in requests_of(file, rows):
        prompt = random.integers(3, 16_000, length).tolist()
        running.append(core.add(SequenceRequest(prompt, max_tokens, Sampling(temperature=0))))
    begun = time.process_time()
    left = len(running)
    while left:
        left -= sum(output.is_finished for output in core.step() or ())
    return time.process_time() - begun


def seconds_of(folder: Path, arguments: argparse.Namespace, by: str) -> float:
    """Return `run_one`'s figure from a separate process."""
    command = [sys.executable, "-m", "bench.compare.families", str(arguments.file), "--by", by]
    command += ["--rows", str(arguments.rows), "--model", str(folder), "--dtype", arguments.dtype]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=one_thread)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    """Print the table, or the figure of one process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument(
        "--dtype", default="bfloat16", help="use this dtype: %(default)s or float32"
    )
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--by", choices=(OURS, THEIRS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.by is not None:
        if arguments.by == THEIRS:
            from tidemill.engine.model.families.registry import FAMILIES as OWN

            OWN.clear()
        print(run_one(arguments.model, arguments.file, arguments.rows, arguments.dtype))
        return
    print("| family | own, CPU s | transformers' classes, CPU s | times |\n|---|---:|---:|---:|")
    for name in arguments.families.split(","):
        with tempfile.TemporaryDirectory() as folder:
            make_model(name, Path(folder))
            ours = seconds_of(Path(folder), arguments, OURS)
            cells = [f"{ours:.1f}", "not run by them", ""]
            if name not in ONLY_OURS:
                theirs = seconds_of(Path(folder), arguments, THEIRS)
                cells[1:] = [f"{theirs:.1f}", f"{theirs / ours:.2f}"]
        print(f"| {name.replace('Config', '')} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
