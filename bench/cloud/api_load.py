"""Clients that poll one batch: errors, and the time that our handler takes.

    python -m bench.cloud.api_load [--clients N] [--seconds N] [--runs N]

The API's Lambda runs in this process as one instance that answers a request at a time, behind the
tests' gateway and over an emulator. Each client, all in another process, polls once a second. The
handler reports its own time in `Server-Timing`: the total, and the part that went into calls
to AWS, which is boto3 and here the emulator's DynamoDB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx

from tests.emulators import running
from tests.handler.api.rig import serving
from tests.handler.api.server import listening
from tests.handler.intake.rig import Cloud, lines_of
from tidemill.handler.tenants.keys import KeyStore

_NUM_LINES = 20_000
_SHARD_LINES = 1_000
_TIMING = re.compile(r"total;dur=([\d.]+), aws;dur=([\d.]+)")
_WARM_UP_SECONDS = 5.0


@dataclass(slots=True)
class Seen:
    """Results of the clients: latency of each response in milliseconds, and failures."""

    whole: list[float] = field(default_factory=list)
    handler: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    def note(self, response: httpx.Response, milliseconds: float) -> None:
        """Record one answer."""
        timing = _TIMING.search(response.headers.get("server-timing", ""))
        if response.status_code != 200 or timing is None:
            self.failures[f"{response.status_code} {response.text[:200]}"] += 1
            return
        total, waited = float(timing[1]), float(timing[2])
        self.whole.append(milliseconds)
        self.handler.append(total)
        self.own.append(max(0.0, total - waited))


async def poll(api: httpx.AsyncClient, path: str, seen: Seen, until: float) -> None:
    """Poll once a second until the end time."""
    while (started := time.perf_counter()) < until:
        try:
            response = await api.get(path)
        except httpx.HTTPError as exc:
            seen.failures[type(exc).__name__] += 1
        else:
            seen.note(response, (time.perf_counter() - started) * 1e3)
        await asyncio.sleep(max(0.0, started + 1 - time.perf_counter()))


async def measure(url: str, key: str, clients: int, seconds: float) -> Seen:
    """Return the latencies of `clients` for `seconds`; they start within one second."""
    seen = Seen()
    until = time.perf_counter() + seconds
    headers, limits = {"Authorization": f"Bearer {key}"}, httpx.Limits(max_connections=clients)

    async def start_client(number: int) -> None:
        await asyncio.sleep(number / clients)
        await poll(api, url, seen, until)

    async with httpx.AsyncClient(headers=headers, timeout=30, limits=limits) as api:
        await asyncio.gather(*map(start_client, range(clients)))
    return seen


def serve(clients: int, seconds: float, runs: int) -> None:
    """Serve a batch that waits for workers, and let another process poll it."""
    with (
        tempfile.TemporaryDirectory() as folder,
        running("ministack", Path(folder)) as emulator,
        serving(Cloud.on(emulator, shard_lines=str(_SHARD_LINES))) as cloud,
        listening() as url,
    ):
        keys = KeyStore(cloud.deployment.table.name)
        key = cloud.run(keys.create(tenant="default", name="load", now=1))
        batch = cloud.ingest(cloud.create(lines_of(_NUM_LINES)))
        command = [
            sys.executable,
            "-m",
            "bench.cloud.api_load",
            "--poll",
            f"{url}/v1/batches/{batch.id}",
        ]
        command += ["--key", key, "--clients", str(clients)]
        subprocess.run(
            [*command, "--seconds", str(_WARM_UP_SECONDS)], check=True, stdout=subprocess.DEVNULL
        )
        for _ in range(runs):
            done = subprocess.run(
                [*command, "--seconds", str(seconds)], check=True, stdout=subprocess.PIPE, text=True
            )
            show(json.loads(done.stdout), batch.num_shards, clients, seconds)


def show(seen: dict[str, list[float]], num_shards: int, clients: int, seconds: float) -> None:
    """Print answers and failures, and median and 99th percentile of the times."""
    answers = len(seen["whole"])
    print(f"{answers} answers to {clients} clients in {seconds:g} s, {num_shards} shards")
    print(f"  failures: {seen['failures'] or 'none'}")
    for name, words in (
        ("own", "our handler without calls to AWS"),
        ("handler", "our handler with them"),
        ("whole", "whole request, waiting its turn"),
    ):
        median, p99 = statistics.median(seen[name]), statistics.quantiles(seen[name], n=100)[98]
        print(f"  {words:34} p50 {median:7.1f} ms   p99 {p99:7.1f} ms", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the clients' latencies, run by run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--poll", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--key", help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    if parsed.poll:
        found = asyncio.run(measure(parsed.poll, parsed.key, parsed.clients, parsed.seconds))
        print(json.dumps(asdict(found)))
    else:
        serve(parsed.clients, parsed.seconds, parsed.runs)


if __name__ == "__main__":
    main()
