"""A client of streams, the same for every server: the time of each event, and completeness.

    python -m bench.server.streams http://127.0.0.1:8000 --model NAME --streams 64 --requests 128

Prints one line of JSON. Bytes are read off the socket as they come; nothing is parsed until the
end, so that the client is not what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from bench.models import NUM_COMMON_WORDS, words

PROMPT_WORDS = 96
MAX_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Stream:
    """One answer: the time of its request, and each read with its time, on one clock."""

    started_at: float
    reads: Sequence[tuple[float, bytes]]

    @property
    def first(self) -> float:
        """Return the seconds to the first event."""
        return next(at for at, data in self.reads if b"data:" in data) - self.started_at

    @property
    def ended(self) -> float:
        """Return the time of the last byte."""
        return self.reads[-1][0]

    def counts(self) -> list[int]:
        """Return the number of tokens so far in each event with a choice."""
        text = b"".join(data for _, data in self.reads)
        lines = (line for line in text.splitlines() if line.startswith(b"data: {"))
        events = [json.loads(line[6:]) for line in lines]
        return [event["usage"]["completion_tokens"] for event in events if event["choices"]]


@dataclass(frozen=True, slots=True)
class Figures:
    """Result of some streams: seconds, and tokens a second of all."""

    first_p50: float
    first_p99: float
    tokens_per_second: float
    num_wrong: int


async def measure(url: str, model: str, *, streams: int, requests: int, seed: int = 0) -> Figures:
    """Send a number of requests, some of them concurrently, and return their streams."""
    draw, waiting = random.Random(seed), asyncio.Semaphore(streams)
    vocabulary = words(NUM_COMMON_WORDS)
    bodies = [_body(model, draw, vocabulary) for _ in range(requests)]
    host, port = urlsplit(url).hostname or "", urlsplit(url).port or 80

    async def ask(body: bytes) -> Stream:
        async with waiting:
            return await _request(host, port, body)

    begun = time.monotonic()
    answers = await asyncio.gather(*map(ask, bodies))
    seconds = max(answer.ended for answer in answers) - begun
    counts = [answer.counts() for answer in answers]
    firsts = sorted(answer.first for answer in answers)
    return Figures(
        first_p50=firsts[len(firsts) // 2],
        first_p99=firsts[min(len(firsts) - 1, len(firsts) * 99 // 100)],
        tokens_per_second=sum(count[-1] for count in counts if count) / seconds,
        num_wrong=sum(not _is_whole(count) for count in counts),
    )


def _is_whole(counts: Sequence[int]) -> bool:
    """Return whether a stream is complete and in order: counts grow to the last token."""
    return bool(counts) and [*counts] == sorted(counts) and counts[-1] == MAX_TOKENS


def _body(model: str, draw: random.Random, vocabulary: Sequence[str]) -> bytes:
    return json.dumps(
        {
            "model": model,
            "prompt": " ".join(draw.choices(vocabulary, k=PROMPT_WORDS)),
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
    ).encode()


async def _request(host: str, port: int, body: bytes) -> Stream:
    reader, writer = await asyncio.open_connection(host, port)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    started_at, reads = time.monotonic(), []
    writer.write(head.encode() + body)
    while data := await reader.read(2**16):
        reads.append((time.monotonic(), data))
    writer.close()
    return Stream(started_at, reads)


def main() -> None:
    """Measure one server and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--requests", type=int, required=True)
    given = parser.parse_args()
    figures = asyncio.run(
        measure(given.url, given.model, streams=given.streams, requests=given.requests)
    )
    print(json.dumps({name: getattr(figures, name) for name in Figures.__slots__}))


if __name__ == "__main__":
    main()
