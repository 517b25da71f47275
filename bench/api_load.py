"""Clients that poll one batch of the local cloud: errors, and the time that our handler takes.

    python -m bench.api_load [--clients N] [--seconds N]

The real stacks run on the emulator, without workers, so that the batch stays as it is. Each client
asks once a second. The handler tells its own time in `Server-Timing`: what it took in all, and what
of that it waited for the emulator's DynamoDB, which is not ours.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import re
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from infra.client import ENDED
from infra.config import DEFAULT_PATH
from localstack.local import LocalCloud, LocalOptions, running_cloud

_MODEL = "tidemill-demo"
_NUM_LINES = 20_000
_TIMING = re.compile(r"total;dur=([\d.]+), aws;dur=([\d.]+)")
_WARM_UP_SECONDS = 5.0


@dataclass(slots=True)
class Seen:
    """What the clients have seen: milliseconds of each answer, and what was no answer."""

    whole: list[float] = field(default_factory=list)
    handler: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    def note(self, response: httpx.Response, milliseconds: float) -> None:
        """Take one answer."""
        timing = _TIMING.search(response.headers.get("server-timing", ""))
        if response.status_code != 200 or timing is None:
            self.failures[f"{response.status_code} {response.text[:200]}"] += 1
            return
        total, waited = float(timing[1]), float(timing[2])
        self.whole.append(milliseconds)
        self.handler.append(total)
        self.own.append(max(0.0, total - waited))


def make_batch(cloud: LocalCloud) -> str:
    """Make a batch that waits for workers, and return its id once it has shards."""
    line = {"method": "POST", "url": "/v1/completions", "body": {"model": _MODEL, "prompt": "a"}}
    lines = (json.dumps({"custom_id": str(number), **line}) for number in range(_NUM_LINES))
    body = io.BytesIO("\n".join(lines).encode())
    headers = {"Authorization": f"Bearer {cloud.key}"}
    with httpx.Client(base_url=f"{cloud.api_url}/v1/", headers=headers, timeout=60) as api:
        uploaded = api.post("files", data={"purpose": "batch"}, files={"file": body}).json()
        asked = {
            "input_file_id": uploaded["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        batch = api.post("batches", json=asked).json()
        while batch["status"] == "validating":
            time.sleep(0.5)
            batch = api.get(f"batches/{batch['id']}").json()
    assert batch["status"] not in ENDED, batch
    return str(batch["id"])


async def poll(api: httpx.AsyncClient, path: str, seen: Seen, until: float) -> None:
    """Ask once a second until the time has come."""
    while (started := time.perf_counter()) < until:
        try:
            response = await api.get(path)
        except httpx.HTTPError as exc:
            seen.failures[type(exc).__name__] += 1
        else:
            seen.note(response, (time.perf_counter() - started) * 1e3)
        await asyncio.sleep(max(0.0, started + 1 - time.perf_counter()))


async def measure(cloud: LocalCloud, batch_id: str, clients: int, seconds: float) -> Seen:
    """Return what so many clients see in so many seconds."""
    seen = Seen()
    until = time.perf_counter() + seconds
    headers = {"Authorization": f"Bearer {cloud.key}"}
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(
        base_url=f"{cloud.api_url}/v1/", headers=headers, timeout=30, limits=limits
    ) as api:
        await asyncio.gather(
            *(poll(api, f"batches/{batch_id}", seen, until) for _ in range(clients))
        )
    return seen


def show(name: str, milliseconds: Sequence[float]) -> None:
    """Print median and 99th percentile."""
    p99 = statistics.quantiles(milliseconds, n=100)[98]
    print(f"{name:24} p50 {statistics.median(milliseconds):7.1f} ms   p99 {p99:7.1f} ms")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print requests, failures, and the times of handler and whole requests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60)
    parsed = parser.parse_args(arguments)
    with running_cloud(LocalOptions(config=DEFAULT_PATH, workers=0), print) as cloud:
        batch_id = make_batch(cloud)
        asyncio.run(measure(cloud, batch_id, parsed.clients, _WARM_UP_SECONDS))
        seen = asyncio.run(measure(cloud, batch_id, parsed.clients, parsed.seconds))
    print(f"{len(seen.whole)} answers to {parsed.clients} clients in {parsed.seconds:g} s")
    print(f"failures: {dict(seen.failures) or 'none'}")
    if len(seen.whole) < 2:
        return
    show("our handler, its own time", seen.own)
    show("our handler, in all", seen.handler)
    show("whole request", seen.whole)


if __name__ == "__main__":
    main()
