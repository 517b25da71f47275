"""Processor time per request of each endpoint that a generator answers, and of vendors' lines.

    python -m bench.kernels.endpoint_cost [--requests 400] [--rounds 5]

The small model answers one token per request, so the difference to a chat is the endpoint's own
work: validation, translation and the body. A vendor's line is only translated to a request. Rounds
take the endpoints in turns; medians are printed as a markdown table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, Final

from tidemill import demo
from tidemill.batch.file.lines import Vendor
from tidemill.batch.file.vendor_lines import request_lines
from tidemill.engine.config import EngineConfig
from tidemill.engine.load import load_served

_AT_ONCE: Final = 100


def _question(number: int) -> str:
    return f"What is the capital of country number {number}?"


def _messages(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": _question(number)}]


BODIES: Final[Mapping[str, Callable[[int], dict[str, Any]]]] = {
    "/v1/chat/completions": lambda number: {"messages": _messages(number), "max_tokens": 1},
    "/v1/completions": lambda number: {"prompt": _question(number), "max_tokens": 1},
    "/v1/responses": lambda number: {"input": _question(number), "max_output_tokens": 1},
}
LINES: Final[Mapping[Vendor, Callable[[int], dict[str, Any]]]] = {
    "anthropic": lambda number: {
        "custom_id": str(number),
        "params": {"model": "m", "max_tokens": 1, "messages": _messages(number)},
    },
    "gemini": lambda number: {
        "key": str(number),
        "request": {"contents": [{"role": "user", "parts": [{"text": _question(number)}]}]},
    },
}


def measure(requests: int, rounds: int) -> dict[str, float]:
    """Return microseconds of processor time per request, the median of the rounds."""
    config = EngineConfig(str(demo.MODEL_PATH), device="cpu", deduplication=False)
    engine = load_served(config, served_names=(demo.NAME,))
    seconds: dict[str, list[float]] = {name: [] for name in (*BODIES, *LINES)}

    async def respond(url: str, first: int) -> None:
        for start in range(first, first + requests, _AT_ONCE):
            numbers = range(start, min(start + _AT_ONCE, first + requests))
            bodies = [{"model": demo.NAME, **BODIES[url](number)} for number in numbers]
            replies = await asyncio.gather(
                *(engine.respond(url, body, f"id{at}", 0) for at, body in enumerate(bodies))
            )
            assert {reply.status_code for reply in replies} == {200}

    try:
        for number in range(rounds + 1):
            for url in BODIES:
                began = time.process_time()
                asyncio.run(respond(url, number * requests))
                seconds[url].append(time.process_time() - began)
            for vendor, line in LINES.items():
                data = b"".join(json.dumps(line(each)).encode() + b"\n" for each in range(requests))
                began = time.process_time()
                lines = b"".join(request_lines(vendor, [data], None))
                seconds[vendor].append(time.process_time() - began)
                assert lines.count(b"\n") == requests
    finally:
        engine.close()
    # The first round warms up.
    return {name: median(values[1:]) / requests * 1e6 for name, values in seconds.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels.endpoint_cost")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    print("| endpoint or vendor | µs per request |\n|---|---:|")
    for name, microseconds in measure(options.requests, options.rounds).items():
        print(f"| {name} | {microseconds:,.0f} |")


if __name__ == "__main__":
    main()
