"""Interactive requests next to a batch: first-token latency and line rate, alone and together.

    python -m bench.server.mixed out/bench/46m [--lines 5000] [--rate 4] [--seconds 150]

One `tidemill serve` process runs three phases: requests alone for some seconds, a batch alone, and
such a batch with requests until it has ended. No two prompts are alike, so nothing is cached.
Requests come at random moments, `--rate` per second, whether or not earlier ones are answered, and
stream. Prints one line of JSON, with two ratios: p99 of the seconds to a first token, together by
alone (at most 1.5), and rows a second of the batch, together by alone (at least 0.8).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from bench.models import NUM_COMMON_WORDS, words
from bench.server.served import Place, serving

NAME = "bench"
PROMPT_WORDS, LINE_TOKENS, ONLINE_TOKENS = 128, 64, 32
_POLL_SECONDS = 0.5
_MOST_TTFT, _LEAST_RATE = 1.5, 0.8


class Prompts:
    """Unique texts."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._words = words(NUM_COMMON_WORDS)

    def __next__(self) -> str:
        """Return another text."""
        return " ".join(self._draw.choices(self._words, k=PROMPT_WORDS))

    def body(self, max_tokens: int, **more: Any) -> dict[str, Any]:
        """Return a request for `max_tokens` tokens."""
        body = {"model": NAME, "prompt": next(self), "max_tokens": max_tokens, **more}
        return {**body, "temperature": 0, "ignore_eos": True}


class Online:
    """Users that send requests at random moments, until the context ends."""

    def __init__(self, place: Place, rate: float, seed: int) -> None:
        self.first_seconds: list[float] = []
        self.num_failed = 0
        self._place = place
        self._rate = rate
        self._draw = random.Random(seed)
        self._prompts = Prompts(seed)
        self._tasks: set[asyncio.Task[None]] = set()

    async def come(self) -> None:
        """Send requests until it is cancelled."""
        while True:
            await asyncio.sleep(self._draw.expovariate(self._rate))
            task = asyncio.create_task(self._ask())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def finish(self) -> None:
        """Wait for all pending requests."""
        await asyncio.gather(*self._tasks)

    async def _ask(self) -> None:
        body = json.dumps(self._prompts.body(ONLINE_TOKENS, stream=True)).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._place.host}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(self._place.host, self._place.port)
        started_at, first, read = time.monotonic(), None, b""
        writer.write(head.encode() + body)
        while data := await reader.read(2**16):
            read += data
            if first is None and b"data:" in read:
                first = time.monotonic() - started_at
        writer.close()
        if first is None or b"[DONE]" not in read:
            self.num_failed += 1
        else:
            self.first_seconds.append(first)


async def measure(place: Place, *, lines: int, rate: float, seconds: float) -> dict[str, Any]:
    """Return the results of the three phases."""
    await _requests(place, rate, 10.0, seed=1)  # warm-up
    idle = await _requests(place, rate, seconds, seed=2)
    async with httpx.AsyncClient(base_url=place.url, timeout=600) as client:
        alone_seconds = await _batch_seconds(client, b"".join(_lines(lines, seed=4)))
        online = Online(place, rate, seed=3)
        coming = asyncio.create_task(online.come())
        together_seconds = await _batch_seconds(client, b"".join(_lines(lines, seed=5)))
        coming.cancel()
        await online.finish()
    ttft_ratio = _share(online.first_seconds, 0.99) / _share(idle.first_seconds, 0.99)
    rate_ratio = alone_seconds / together_seconds
    return {
        "ttft_alone": _percentiles(idle.first_seconds),
        "ttft_together": _percentiles(online.first_seconds),
        "ttft_ratio": round(ttft_ratio, 2),
        "rows_per_second_alone": round(lines / alone_seconds, 2),
        "rows_per_second_together": round(lines / together_seconds, 2),
        "rate_ratio": round(rate_ratio, 2),
        "failed": idle.num_failed + online.num_failed,
        "holds": ttft_ratio <= _MOST_TTFT and rate_ratio >= _LEAST_RATE,
    }


async def _requests(place: Place, rate: float, seconds: float, seed: int) -> Online:
    online = Online(place, rate, seed)
    coming = asyncio.create_task(online.come())
    await asyncio.sleep(seconds)
    coming.cancel()
    await online.finish()
    return online


async def _batch_seconds(client: httpx.AsyncClient, data: bytes) -> float:
    """Run a batch to its end and return the seconds between its first line and its last."""
    form = {"files": {"file": ("in.jsonl", data)}, "data": {"purpose": "batch"}}
    uploaded = (await client.post("/v1/files", **form)).raise_for_status().json()  # type: ignore[arg-type]
    body = {"input_file_id": uploaded["id"], "endpoint": "/v1/completions"}
    batch = (await client.post("/v1/batches", json=body)).raise_for_status().json()
    began = time.monotonic()
    while batch["status"] in {"validating", "in_progress"}:
        if batch["status"] == "validating":
            began = time.monotonic()
        await asyncio.sleep(_POLL_SECONDS)
        batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
    if batch["request_counts"]["completed"] != batch["request_counts"]["total"]:
        raise RuntimeError(f"the batch ended as {batch['status']}: {batch['errors']}")
    return time.monotonic() - began


def _lines(count: int, seed: int) -> Iterator[bytes]:
    prompts = Prompts(seed)
    for number in range(count):
        line = {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": prompts.body(LINE_TOKENS),
        }
        yield json.dumps(line).encode() + b"\n"


def _share(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return milliseconds at some percentiles, and the number of values."""
    shares = {f"p{int(share * 100)}_ms": _share(values, share) * 1000 for share in (0.5, 0.9, 0.99)}
    return {name: round(value, 1) for name, value in shares.items()} | {"count": len(values)}


def main() -> None:
    """Measure one model and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--lines", type=int, default=5000)
    parser.add_argument("--rate", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--log", type=Path, default=Path("out/bench/mixed.log"))
    parser.add_argument("flags", nargs="*", help="pass these flags to the server, after --")
    given = parser.parse_args()
    given.log.parent.mkdir(parents=True, exist_ok=True)
    flags = ("--model", given.model, "--served-model-name", NAME, *given.flags)
    with serving(*flags, log=given.log) as place:
        figures = asyncio.run(
            measure(place, lines=given.lines, rate=given.rate, seconds=given.seconds)
        )
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
