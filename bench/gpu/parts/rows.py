"""Greedy rows: a real run compared with a CPU's, and the loop with transformers' eager attention.

The demo model is run by `tidemill run` in fp32; a CPU's answers to the same file are next to the
model's requests in this folder, written by

    python -m bench.gpu.parts.rows > bench/gpu/parts/greedy_rows.json
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu.parts.task import Numbers, Place, Task
from bench.gpu.random_models import filled_from, loaded
from bench.gpu.shapes import CONFIGS, MIXED, TINY_MIXED, architecture
from bench.gpu.wheels import LEFT_OUT
from tidemill.engine.config import EngineConfig
from tidemill.engine.loop.assembly import make_core
from tidemill.engine.model.network.kv_cache_size import KVCacheSize
from tidemill.engine.model.network.loaded_model import LoadedModel
from tidemill.engine.scheduling.sequence import Sampling, SequenceRequest

GREEDY = Sampling(temperature=0)
# Allowed distance of our token below the likeliest in fp32, as a multiple of transformers' own:
# with random weights the best two are nearly equal, so that rounding chooses.
TIMES_THEIRS, SPARE = 1.25, 1e-3
EXPECTED = Path(__file__).with_name("greedy_rows.json")
MODEL = Path(__file__).parents[3] / "demo" / "model"
# The command, and on a last line: seconds of each step of its load, processor time, graphs.
RUN = """
import json, sys, time
from tidemill.offline.console.signals import end_process
from tidemill.cli.main import main
from tidemill.engine.loop.cuda_graphs import CudaCapture
from tidemill.engine.model.load_timing import step_seconds
taken, capture = [], CudaCapture.__call__
def timed(*arguments):
    began = time.perf_counter()
    captured = capture(*arguments)
    taken.append(time.perf_counter() - began)
    return captured
CudaCapture.__call__ = timed
status = main()
figures = {"load": step_seconds(), "processor_seconds": time.process_time()}
figures |= {"captures": len(taken), "capture_seconds": sum(taken)}
print(json.dumps(figures), file=sys.stderr)
end_process(status)
"""
NUM_LINES, NUM_TINY_LINES, MOST_NUMBERS, MAX_TOKENS = 160, 12, 60, 24
KV_CACHE = "1G"


def tasks(place: Place) -> Iterator[Task]:
    """Yield a real run, and the loop's rows of a dense, a hybrid and a windowed model."""
    yield Task("tidemill run", partial(real_run, place), 30)
    for name in ("tiny", *TINY_MIXED) if place.is_tiny else ("llama-3-1b", *MIXED):
        yield Task(f"greedy rows, {name}", partial(rows, place, name), 15)


def requests(count: int) -> Iterator[dict[str, Any]]:
    """Yield the lines of the run: sums after contexts of many lengths, some of them shared."""
    rng = random.Random(0)
    for number in range(count):
        first, second = rng.sample(range(100), 2)
        # Some contexts have one page, some several tiles; every fourth one is the same.
        count = 40 if number % 4 == 0 else rng.randrange(MOST_NUMBERS)
        counted = " ".join(f"{place} + 1 = {place + 1}." for place in range(count))
        question = f"{counted} What is {first} + {second}?".strip()
        yield {
            "custom_id": f"sum-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "tidemill-demo",
                "messages": [{"role": "user", "content": question}],
                "max_tokens": MAX_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
            },
        }


def run(device: str, folder: Path, count: int = NUM_LINES) -> list[str]:
    """Run the first lines of the file on a device and return the answers."""
    source, target = folder / "requests.jsonl", folder / "rows.jsonl"
    source.write_text("".join(json.dumps(one) + "\n" for one in requests(count)), encoding="utf-8")
    command = ["run", str(source), "-o", str(target)]
    command += ["--model", str(MODEL), "--served-model-name", "tidemill-demo"]
    command += ["--device", device, "--dtype", "float32", "--kv-cache-memory", KV_CACHE]
    run_tidemill(command, folder)
    answered = map(json.loads, target.read_text(encoding="utf-8").splitlines())
    return [row["response"]["body"]["choices"][0]["message"]["content"] for row in answered]


def run_tidemill(arguments: list[str], folder: Path) -> str:
    """Run a command of Tidemill's in a separate process; return its output."""
    # Its kernels are compiled (numba's on a CPU): nothing is interpreted.
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(stand_ins(folder)), *sys.path[1:]])
    command = [sys.executable, "-c", RUN, *arguments]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(
            f"tidemill ended with exit status {ran.returncode}: "
            f"{' '.join(ran.stderr.split())[-500:]}"
        )
    return ran.stderr


def stand_ins(folder: Path) -> Path:
    """Create empty packages for missing modules that a run imports but only recordings need."""
    site = folder / "site"
    site.mkdir(exist_ok=True)
    for name in LEFT_OUT:
        if find_spec(name) is None:
            (site / name).mkdir(exist_ok=True)
            (site / name / "__init__.py").touch()
    return site


def real_run(place: Place) -> Numbers:
    """Compare a run on this device with a CPU's rows, in fp32: all are equal."""
    with tempfile.TemporaryDirectory() as folder:
        count = NUM_TINY_LINES if place.is_tiny else NUM_LINES
        found = run(place.device.type, Path(folder), count)
    expected = json.loads(EXPECTED.read_text(encoding="utf-8"))[:count]
    pairs = enumerate(zip(found, expected, strict=True))
    others = [number for number, (one, other) in pairs if one != other]
    return {
        "rows": len(found),
        "rows_alike": len(found) - len(others),
        "others": others,
        "holds": not others,
    }


def rows(place: Place, name: str) -> Numbers:
    """Generate with our loop, and compare each token with transformers' choice.

    transformers reads our tokens, so that one near tie does not change all later tokens. Its fp32
    logits decide whose tokens are closer.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    count, prompt, output = (2, 9, 3) if place.is_tiny else (32, 300, 64)
    dtype = torch.float32 if place.is_tiny else torch.bfloat16
    model = architecture(name)
    torch.manual_seed(0)
    config = AutoConfig.for_model(**CONFIGS[name])
    with torch.device(place.device):
        theirs = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="eager"
        ).eval()
    rng = np.random.default_rng(0)
    lengths = rng.integers(prompt // 2, prompt, count)
    prompts = [rng.integers(0, model.vocab_size, length).tolist() for length in lengths]
    weights = filled_from(model, theirs.state_dict(), dtype, place.device)
    network = loaded(model, weights, max_model_len=prompt + output)
    ours = generated(network, prompts, output)
    pairs = list(zip(prompts, ours, strict=True))
    choices = [logits_after(theirs, *pair).argmax(1) for pair in pairs]
    same = sum(own == other.tolist() for own, other in zip(ours, choices, strict=True))
    theirs.float()
    own_gap, their_gap = 0.0, 0.0
    for pair, other in zip(pairs, choices, strict=True):
        logits = logits_after(theirs, *pair)
        own = torch.tensor(pair[1], device=place.device)
        own_gap = max(own_gap, logit_gap(logits, own))
        their_gap = max(their_gap, logit_gap(logits, other))
    bound = TIMES_THEIRS * their_gap + SPARE
    return {
        "rows": count,
        "rows_alike": same,
        "largest_gap": own_gap,
        "bound": bound,
        "holds": own_gap <= bound,
    }


@torch.inference_mode()
def logits_after(model: Any, before: list[int], after: list[int]) -> torch.Tensor:
    """Return a model's logits at each chosen token of an answer."""
    ids = torch.tensor([before + after], device=model.device)
    logits: torch.Tensor = model(ids).logits[0, len(before) - 1 : -1].double()
    return logits


def logit_gap(logits: torch.Tensor, tokens: torch.Tensor) -> float:
    """Return how far tokens are below the likeliest, in standard deviations of their logits."""
    below = logits.amax(1) - logits.gather(1, tokens[:, None]).squeeze(1)
    return float((below / logits.std(1)).max())


def generated(model: LoadedModel, prompts: list[list[int]], output: int) -> list[list[int]]:
    """Return our loop's answer to each prompt."""
    # Interpreted, the largest graph takes a minute.
    most = 1024 if model.device.type == "cuda" else 32
    config = EngineConfig("random", max_num_seqs=32, max_num_batched_tokens=most)
    total = sum(map(len, prompts)) + len(prompts) * (output + 64)
    num_pages = (total // model.backend.page_size + 1) * len(model.layer_groups)
    core = make_core(model, KVCacheSize(num_pages, model.max_model_len, 36), config)
    sequences = [core.add(SequenceRequest(prompt, output, GREEDY)) for prompt in prompts]
    while core.step() is not None:
        pass
    return [sequence.result().token_ids for sequence in sequences]


def main() -> None:
    """Print the rows of a CPU."""
    with tempfile.TemporaryDirectory() as folder:
        found = run("cpu", Path(folder))
    print(json.dumps(found, ensure_ascii=False, indent=0))


if __name__ == "__main__":
    main()
