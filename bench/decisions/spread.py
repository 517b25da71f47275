"""Spread of decisions: how much a read depends on the rows, chunks and cache hits next to it.

    python -m bench.decisions.spread [--model FOLDER] [--dtypes float32 bfloat16] [--rows 256]
        [--batch-invariant]

Each row is read alone, without cached pages and in whole prompts; then from cached pages, with more
rows at once, and by engines with smaller steps, which cut prompts into chunks. Printed are the
largest difference of a probability, and the share of rows whose answers are the same bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

from bench.workloads import Texts
from tidemill.demo import MODEL_PATH
from tidemill.engine.config import EngineConfig
from tidemill.engine.endpoints.dispatcher import Dispatcher
from tidemill.engine.load import load_served

LAYOUTS = ("row_first", "questions_first")
# Tokens of a step, and rows at once.
WAYS = ((4096, (1, 8, 64, 256)), (512, (64,)), (64, (1, 64)))
QUESTIONS = [
    {"type": "predicate", "instructions": "Is a city named?"},
    {
        "type": "choice",
        "instructions": "Which subject?",
        "choices": [{"value": name} for name in ("travel", "money", "weather", "food")],
    },
    {
        "type": "choice",
        "instructions": "Which shelf?",
        "choices": [{"value": f"shelf {number}"} for number in range(30)],
    },
]
Row = list[list[float]]


def bodies(count: int, layout: str) -> list[dict[str, Any]]:
    """Return requests about texts of 10 to 160 words, half of which begin alike."""
    texts = Texts()
    common, sizes = texts(40), [10 + 150 * number // max(1, count - 1) for number in range(count)]
    states = [(common + " ") * (number % 2) + texts(size) for number, size in enumerate(sizes)]
    return [{"input": state, "questions": QUESTIONS, "question_layout": layout} for state in states]


async def read(served: Dispatcher, requests: Sequence[dict[str, Any]], at_once: int) -> list[Row]:
    """Return the probabilities of all requests, with so many of them running at once."""
    places = asyncio.Semaphore(at_once)

    async def one(number: int, body: dict[str, Any]) -> Row:
        async with places:
            reply = await served.respond("/v1/decisions", body, f"req_{number}", 0)
        assert reply.status_code == 200, reply.body
        return [_probabilities(answer) for answer in reply.body["answers"]]

    return await asyncio.gather(*(one(number, body) for number, body in enumerate(requests)))


def _probabilities(answer: dict[str, Any]) -> list[float]:
    if "probability" in answer:
        return [answer["probability"]]
    return [option["probability"] for option in answer["probabilities"]]


def spreads(config: dict[str, Any], count: int, layout: str) -> Iterator[tuple[str, float, float]]:
    """Yield for each way its name, the largest difference, and the share of equal rows."""
    requests = bodies(count, layout)
    alone: list[Row] = []
    for budget, several in WAYS:
        limits: dict[str, Any] = {
            "max_num_batched_tokens": budget,
            "max_num_seqs": min(budget, 256),
        }
        served = load_served(EngineConfig(**config, **limits))
        try:
            for at_once in several:
                salted = [
                    body | {"cache_salt": f"{at_once} {i}"} for i, body in enumerate(requests)
                ]
                for is_cached in (False, True):
                    rows = asyncio.run(read(served, salted, at_once))
                    alone = alone or rows
                    name = (
                        f"{budget} tokens, {at_once} at once, {'' if is_cached else 'not '}cached"
                    )
                    yield name, *_difference(alone, rows)
        finally:
            served.close()


def _difference(alone: Sequence[Row], rows: Sequence[Row]) -> tuple[float, float]:
    largest = max(
        abs(a - b)
        for one, other in zip(alone, rows, strict=True)
        for ours, theirs in zip(one, other, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )
    same = sum(json.dumps(a) == json.dumps(b) for a, b in zip(alone, rows, strict=True))
    return largest, same / len(alone)


def main() -> None:
    """Print a table for each dtype and layout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(MODEL_PATH))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--batch-invariant", action="store_true")
    options = parser.parse_args()
    for dtype in options.dtypes:
        for layout in LAYOUTS:
            config: dict[str, Any] = {
                "model": options.model,
                "dtype": dtype,
                "device": options.device,
            }
            config["quantization"] = options.quantization
            config["batch_invariant"] = options.batch_invariant
            print(
                f"\n{dtype}, {layout}\n\n| way | largest difference | equal rows |\n|---|---:|---:|"
            )
            for name, largest, share in spreads(config, options.rows, layout):
                print(f"| {name} | {largest:.1e} | {share:.0%} |", flush=True)


if __name__ == "__main__":
    main()
