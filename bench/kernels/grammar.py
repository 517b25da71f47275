"""Structured output: its cost, its memory, and the validity of every row.

    python -m bench.kernels.grammar cost --model out/bench/46m [--sequences 64] [--rounds 5]
        [--no-speculative-decoding]
    python -m bench.kernels.grammar overlap [--sequences 256] [--step-ms 4 8 16]
    python -m bench.kernels.grammar memory [--schemas 5000]
    python -m bench.kernels.grammar valid [--rows 10000]

*Cost*: rows of equal length with a schema each, none of which ends earlier, and without any; the
two run in turns in one process, and the share is that of the medians. *Overlap*: the same on a
simulated device, which takes a fixed time per step and gives no result earlier: the rest is the
host's part. *Memory*: resident, after a tenth of the schemas was compiled, and after all were.
*Valid*: the demo model under schemas that are drawn at random, judged by jsonschema, which does not
use masks; rows cut by their length are counted separately.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.kernels.schemas import drawn_schema
from tidemill.demo import MODEL_PATH
from tidemill.engine.config import EngineConfig
from tidemill.engine.endpoints.dispatcher import Dispatcher
from tidemill.engine.load import load_served
from tidemill.engine.loop.runner import Readout, Runner
from tidemill.engine.loop.step_logits import StepLogits
from tidemill.engine.scheduling.step_plan import StepPlan
from tidemill.protocol.contract import Reply

NUM_TOKENS = 128
_PAGE_KIB = 4


def endless(number: int) -> dict[str, Any]:
    """Return a unique schema of which no text ends within a row's length."""
    kinds = [
        {"type": "string", "maxLength": 40},
        {"type": "number"},
        {"enum": ["red", "green", f"colour {number}"]},
    ]
    names = [f"{name}_{number}" for name in ("title", "price", "kind")]
    item = {
        "type": "object",
        "properties": dict(zip(names, kinds, strict=True)),
        "required": names,
        "additionalProperties": False,
    }
    return {"type": "array", "items": item, "minItems": 1_000}


async def answered(served: Dispatcher, bodies: list[dict[str, Any]]) -> list[Reply]:
    """Return the replies to chats that run together."""
    return await asyncio.gather(
        *(
            served.respond(
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": f"Row {number}."}], **body},
                f"req_{number}",
                0,
            )
            for number, body in enumerate(bodies)
        )
    )


def cost(model: Path, sequences: int, rounds: int, dtype: str, *, drafts: bool) -> None:
    """Print tokens per second with and without a schema for each number of sequences."""
    served = load_served(
        EngineConfig(
            str(model),
            dtype=dtype,  # type: ignore[arg-type]
            max_num_seqs=sequences,
            speculative_decoding=drafts,
        )
    )
    rates = compare(served, sequences, rounds)
    print(f"| {sequences} sequences of {NUM_TOKENS} tokens | tok/s |\n|---|---:|")
    for name, rate in rates.items():
        print(f"| {name} | {rate:,.0f} |")
    print(f"| cost | {1 - rates['with'] / rates['without']:.1%} |")


def compare(served: Dispatcher, sequences: int, rounds: int) -> dict[str, float]:
    """Return tokens per second with and without a schema for each sequence; close the engine."""
    plain = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
    ways: dict[str, list[dict[str, Any]]] = {
        "without": [plain] * sequences,
        "with": [{**plain, "guided_json": endless(number)} for number in range(sequences)],
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, bodies in ways.items():
            started = time.perf_counter()
            replies = asyncio.run(answered(served, bodies))
            seconds[name].append(time.perf_counter() - started)
            lengths = {reply.body["usage"]["completion_tokens"] for reply in replies}
            assert lengths == {NUM_TOKENS}, lengths
    served.close()
    return {
        name: sequences * NUM_TOKENS / statistics.median(taken[1:])
        for name, taken in seconds.items()
    }


class MadeUpDevice:
    """A device that takes a fixed time per step, one after the other, while the host continues."""

    def __init__(self, step_seconds: float, vocabulary: int) -> None:
        self._step_seconds, self._vocabulary = step_seconds, vocabulary
        self._free_at = 0.0

    def run(self, plan: StepPlan) -> StepLogits:
        """Begin a step; its constant logits are available to the sampler at once."""
        self._free_at = max(self._free_at, time.perf_counter()) + self._step_seconds
        return StepLogits(torch.zeros(int(plan.num_logits.sum()), self._vocabulary))

    def read_out(self, tensors: Sequence[Tensor]) -> Readout:
        """Return a step's result, which is available once the device has computed it."""
        readout, there_at = Readout(tensors), self._free_at
        wait = readout.wait

        def wait_for_device() -> list[NDArray[Any]]:
            time.sleep(max(0.0, there_at - time.perf_counter()))
            return wait()

        readout.wait = wait_for_device  # type: ignore[method-assign]
        return readout


def overlap(sequences: int, step_ms: list[float]) -> None:
    """Print tokens per second with and without schemas on devices with these step times."""
    print("| ms a step | tok/s without | with | share |\n|---:|---:|---:|---:|")
    config = EngineConfig(
        str(MODEL_PATH), device="cpu", dtype="float32", max_num_seqs=sequences, steps_ahead=1
    )
    vocabulary = json.loads((MODEL_PATH / "config.json").read_text())["vocab_size"]
    for each in step_ms:
        served, device = load_served(config), MadeUpDevice(each / 1e3, vocabulary)
        with (
            patch.object(Runner, "run", lambda _, plan, device=device: device.run(plan)),
            patch.object(Runner, "read_out", lambda _, sent, device=device: device.read_out(sent)),
            patch.object(Runner, "store_sampled", lambda *_: None),
        ):
            rates = compare(served, sequences, rounds=3)
        share = rates["with"] / rates["without"]
        print(f"| {each:g} | {rates['without']:,.0f} | {rates['with']:,.0f} | {share:.2f} |")


def memory(schemas: int) -> None:
    """Print the resident memory after a tenth of `count` schemas, and after all of them."""
    # Few pages, all in use soon, so that first touches of pages do not count.
    served = load_served(
        EngineConfig(str(MODEL_PATH), dtype="float32", device="cpu", kv_cache_memory=32 * 2**20)
    )
    for start in range(0, schemas, 50):
        bodies = [
            {"guided_json": drawn_schema(seed), "max_tokens": 32, "temperature": 0}
            for seed in range(start, min(start + 50, schemas))
        ]
        asyncio.run(answered(served, bodies))
        if start + 50 in (schemas // 10, schemas // 2, schemas):
            print(f"{start + 50:,} schemas: {resident_mib():,.0f} MiB resident", flush=True)
    served.close()


def resident_mib() -> float:
    """Return this process's memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * _PAGE_KIB / 1024


def valid(rows: int) -> None:
    """Print how many of `rows` match their schemas."""
    served = load_served(
        EngineConfig(str(MODEL_PATH), dtype="float32", device="cpu", proof_rows=True)
    )
    verdicts: Counter[str] = Counter()
    started = time.perf_counter()
    for start in range(0, rows, 500):
        bodies = [
            {"guided_json": drawn_schema(seed), "max_tokens": 1_000, "seed": seed}
            for seed in range(start, min(start + 500, rows))
        ]
        for seed, reply in enumerate(asyncio.run(answered(served, bodies)), start=start):
            verdicts[judged(seed, reply)] += 1
    served.close()
    taken = time.perf_counter() - started
    print(f"{rows:,} rows in {taken:,.0f} s: {json.dumps(dict(verdicts))}")


def judged(seed: int, reply: Reply) -> str:
    """Return the verdict on a row; one that does not match its schema is printed."""
    if reply.status_code != 200:
        print(seed, json.dumps(drawn_schema(seed)), reply.body["error"]["message"])
        return "refused"
    (choice,), (verdict,) = reply.body["choices"], reply.body["tidemill"]["proof"]
    if choice["finish_reason"] == "length":
        return "cut by its length"
    if not verdict["holds"]:
        print(seed, json.dumps(drawn_schema(seed)), choice["message"]["content"], verdict["why"])
    return {True: "valid", False: "not valid", None: "not judged"}[verdict["holds"]]


def main() -> None:
    """Run one measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="what", required=True)
    of_cost = commands.add_parser("cost")
    of_cost.add_argument("--model", type=Path, required=True)
    of_cost.add_argument("--sequences", type=int, default=64)
    of_cost.add_argument("--rounds", type=int, default=5)
    of_cost.add_argument("--dtype", default="auto")
    of_cost.add_argument("--no-speculative-decoding", action="store_true")
    of_overlap = commands.add_parser("overlap")
    of_overlap.add_argument("--sequences", type=int, default=256)
    of_overlap.add_argument("--step-ms", type=float, nargs="+", default=(4.0, 8.0, 16.0))
    commands.add_parser("memory").add_argument("--schemas", type=int, default=5_000)
    commands.add_parser("valid").add_argument("--rows", type=int, default=10_000)
    options = parser.parse_args()
    if options.what == "cost":
        drafts = not options.no_speculative_decoding
        cost(options.model, options.sequences, options.rounds, options.dtype, drafts=drafts)
    elif options.what == "overlap":
        overlap(options.sequences, options.step_ms)
    elif options.what == "memory":
        memory(options.schemas)
    else:
        valid(options.rows)


if __name__ == "__main__":
    main()
