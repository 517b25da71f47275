"""Soak test of a server with clients that vanish, stall, send garbage and large requests.

    python -m bench.server.soak [--minutes N] [--visitors N] [--seed N] [--model PATH]

Many visitors come at once, each with a habit that is drawn from a seed. Some read their answers.
Others hang up during or before an answer, read nothing, send their body slowly, or send bytes that
are not HTTP. There are also large prompts, many completions, bodies that decompress to a multiple
of their size, and batches. Well-behaved visitors must be answered, and others must never get a 5xx.
In the end nothing may run or wait, no page of the KV cache may be held, and memory must be the same
as after caches were filled; it is measured in pauses, when freed memory was returned.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import socket
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx

from bench.processes import tree_bytes
from bench.server.served import Place, serving
from tidemill import demo

_STATE = ("running_sequences", "waiting_sequences", "kv_cache_usage_ratio", "requests_inside")
_STALL_SECONDS = 0.2
_SETTLE_SECONDS = 60.0
_LEAST_LOOKS = 3
_PAUSE_SECONDS = 3.0  # before memory is measured
_LOOK_SECONDS = 15.0
_NUM_LARGE = 8  # in a round
_NUM_LINES, _NUM_LARGE_LINES = 300, 20
_ALLOWED_GROWTH = 1.05
_KV_CACHE = "64M"  # which visitors fill within seconds, so that it does not grow later
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
_WORDS = ("the", "sum", "of", "seven", "capital", "France", "is", "question", "42", "answer")
_QUESTION = "What is 7 plus 5? And what is the capital of France?"


@dataclass(slots=True)
class Seen:
    """Number of visits of each habit, and violations."""

    visits: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Visit:
    """One visitor's connection to a server, with a separate random generator."""

    place: Place
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    draw: random.Random

    def send(self, path: str, body: bytes, *, length: int | None = None) -> None:
        """Send a request; one whose `length` differs from its body's never ends correctly."""
        headers = {
            "Host": self.place.host,
            "Connection": "close",
            "Content-Type": "application/json",
            "Content-Length": str(len(body) if length is None else length),
            **self.place.headers,
        }
        lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        self.writer.write("\r\n".join([*lines, "", ""]).encode() + body)

    def ask(self, **fields: Any) -> bytes:
        """Return the body of a chat, each with a different prompt."""
        text = f"{_QUESTION} ({self.draw.randrange(10**9)})"
        body = {
            "model": self.place.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self.draw.randrange(1, 48),
            "ignore_eos": True,
            **fields,
        }
        return json.dumps(body).encode()

    def vanish(self) -> None:
        """Reset the connection."""
        held: socket.socket = self.writer.get_extra_info("socket")
        held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


async def polite(visit: Visit) -> str | None:
    """Send a request and read the whole answer."""
    visit.send("/v1/chat/completions", visit.ask())
    answer = await visit.reader.read()
    return None if b'"finish_reason":"length"' in answer else _format(answer)


async def streaming(visit: Visit) -> str | None:
    """Request a stream and read it to its end."""
    visit.send("/v1/chat/completions", visit.ask(stream=True))
    answer = await visit.reader.read()
    is_whole = b"data: [DONE]" in answer and b'"finish_reason":"length"' in answer
    return None if is_whole else _format(answer)


async def leaving(visit: Visit) -> str | None:
    """Hang up in the middle of a stream, politely or not."""
    visit.send("/v1/chat/completions", visit.ask(stream=True, max_tokens=400))
    read = await visit.reader.read(visit.draw.randrange(1, 4_000))
    if visit.draw.random() < 0.5:
        visit.vanish()
    return _refusal(read)


async def impatient(visit: Visit) -> str | None:
    """Hang up before there is an answer."""
    visit.send("/v1/chat/completions", visit.ask(max_tokens=400))
    await visit.writer.drain()
    visit.vanish()
    return None


async def stalling(visit: Visit) -> str | None:
    """Read nothing of a stream for a while, then hang up."""
    wordy = visit.ask(stream=True, max_tokens=300, n=8, logprobs=True, top_logprobs=20)
    visit.send("/v1/chat/completions", wordy)
    cast("asyncio.Transport", visit.writer.transport).pause_reading()
    await asyncio.sleep(_STALL_SECONDS)
    visit.vanish()
    return None


async def dripping(visit: Visit) -> str | None:
    """Send a body slowly, and never all of it."""
    body = visit.ask()
    visit.send("/v1/chat/completions", b"", length=len(body))
    for byte in body[: visit.draw.randrange(4, 20)]:
        visit.writer.write(bytes([byte]))
        await asyncio.sleep(0.01)
    return None


async def silent(_: Visit) -> str | None:
    """Send nothing at all."""
    await asyncio.sleep(_STALL_SECONDS)
    return None


async def babbling(visit: Visit) -> str | None:
    """Send bytes that are not HTTP."""
    visit.writer.write(visit.draw.randbytes(visit.draw.randrange(1, 5_000)) + b"\r\n\r\n")
    visit.writer.write_eof()
    return _refusal(await visit.reader.read())


async def wrong(visit: Visit) -> str | None:
    """Send an invalid body, or one with impossible values."""
    bodies = (
        b"",
        b"{",
        b"[1, 2]",
        b'"\\ud800"',
        b'{"messages": 5}',
        visit.draw.randbytes(visit.draw.randrange(1, 5_000)),
        visit.ask(temperature=-1),
        visit.ask(n=10**6),
        visit.ask(model="another"),
        visit.ask(max_tokens=10**9),
        visit.ask(stop=[""]),
        visit.ask(response_format={"type": "xml"}),
        visit.ask(tools=[{"type": "function"}]),
        b"[" * 50_000,
    )
    visit.send(visit.draw.choice(("/v1/chat/completions", "/v1/none")), visit.draw.choice(bodies))
    answer = await visit.reader.read()
    status = _status(answer)
    return None if status is not None and 400 <= status < 500 else _format(answer)


async def large(visit: Visit) -> str | None:
    """Send a long text; most are longer than the context."""
    size = visit.draw.choice((2_000, 200_000, 2_000_000, 8_000_000))
    message = {"role": "user", "content": _text(visit.draw, size)}
    visit.send("/v1/chat/completions", visit.ask(messages=[message], max_tokens=8))
    answer = await visit.reader.read()
    return None if _status(answer) in (200, 400) else _format(answer)


async def tokenizing(visit: Visit) -> str | None:
    """Request the tokens of a text that is longer than the model's context."""
    text = _text(visit.draw, visit.draw.choice((100_000, 1_000_000, 3_000_000)))
    visit.send("/tokenize", json.dumps({"model": visit.place.model, "prompt": text}).encode())
    answer = await visit.reader.read()
    return None if _status(answer) == 400 else _format(answer)


async def many(visit: Visit) -> str | None:
    """Request a few hundred completions at once."""
    prompts = [_text(visit.draw, 20) for _ in range(visit.draw.randrange(1, 300))]
    body = {"model": visit.place.model, "prompt": prompts, "max_tokens": 4, "n": 2}
    visit.send("/v1/completions", json.dumps(body).encode())
    answer = await visit.reader.read()
    return None if _status(answer) == 200 else _format(answer)


async def hollow(visit: Visit) -> str | None:
    """Send millions of empty lists, which would be a gigabyte of them."""
    visit.send("/v1/chat/completions", b'{"messages":[' + b"[]," * 4_000_000 + b"1]}")
    answer = await visit.reader.read()
    return None if _status(answer) == 413 else _format(answer)


Habit = Callable[[Visit], Awaitable[str | None]]

HABITS: tuple[Habit, ...] = (
    polite,
    streaming,
    leaving,
    leaving,
    impatient,
    stalling,
    dripping,
    silent,
    babbling,
    wrong,
)
LARGE: tuple[Habit, ...] = (large, large, tokenizing, many, hollow)


async def visit(place: Place, habit: Habit, draw: random.Random, seen: Seen) -> None:
    """Visit once with a habit, and record errors."""
    name = habit.__name__
    seen.visits[name] += 1
    fault: str | None
    try:
        reader, writer = await asyncio.open_connection(place.host, place.port)
    except OSError as exc:
        seen.faults[f"{name}: {exc}"] += 1
        return
    try:
        fault = await habit(Visit(place, reader, writer, draw))
    except ConnectionError as exc:
        # The server may hang up on visitors that send garbage.
        fault = None if habit in (babbling, dripping, wrong, stalling, leaving) else repr(exc)
    finally:
        writer.close()
    if fault is not None:
        seen.faults[f"{name}: {fault}"] += 1


async def come(
    place: Place,
    *,
    visits: int,
    at_once: int,
    seed: int,
    seen: Seen,
    habits: tuple[Habit, ...] = HABITS,
) -> None:
    """Run a number of visits, some of them concurrently; each draws from the seed alone."""
    room = asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        draw = random.Random(f"{seed} {number}")
        async with room:
            await visit(place, draw.choice(habits), draw, seen)

    await asyncio.gather(*(one(number) for number in range(visits)))


async def run_batch(place: Place, seed: int, seen: Seen) -> None:
    """Run a batch of small and large lines, read its rows, and delete its files."""
    draw = random.Random(f"batch {seed}")
    sizes = [20] * (_NUM_LINES - _NUM_LARGE_LINES) + [100_000] * _NUM_LARGE_LINES
    lines = []
    for number, size in enumerate(sizes):
        messages = [{"role": "user", "content": _text(draw, size)}]
        body = {"model": place.model, "messages": messages, "max_tokens": 8}
        line = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions"}
        lines.append(json.dumps(line | {"body": body}))
    seen.visits["batch"] += 1
    async with httpx.AsyncClient(base_url=place.url, headers=place.headers, timeout=60) as client:
        sent = {"file": ("in.jsonl", "\n".join(lines).encode())}
        file = (await client.post("/v1/files", files=sent, data={"purpose": "batch"})).json()
        body = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
        body["input_file_id"] = file["id"]
        batch = (await client.post("/v1/batches", json=body)).json()
        while batch["status"] in ("validating", "in_progress", "finalizing"):
            await asyncio.sleep(0.2)
            batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
        num_rows = 0
        made = [batch[name] for name in ("output_file_id", "error_file_id") if batch.get(name)]
        for name in made:
            rows = (await client.get(f"/v1/files/{name}/content")).content
            num_rows += rows.count(b"\n")
        for name in (*made, file["id"]):
            await client.delete(f"/v1/files/{name}")
    if batch["status"] != "completed" or num_rows != len(lines):
        seen.faults[f"batch: {batch['status']} with {num_rows} rows of {len(lines)}"] += 1


async def state(place: Place) -> dict[str, float]:
    """Return the resources that the server reports as held."""
    text = await asyncio.to_thread(place.get, "/metrics")
    found = {name: re.search(rf"^tidemill_{name} (\S+)$", text, re.MULTILINE) for name in _STATE}
    missing = [name for name, value in found.items() if value is None]
    if missing:
        raise ValueError(f"the server's metrics have no {', '.join(missing)}")
    return {name: float(value[1]) for name, value in found.items() if value is not None}


async def settled(place: Place, before: dict[str, float]) -> dict[str, float]:
    """Return the state once it is the same as before, or the current one after a timeout."""
    until = time.monotonic() + _SETTLE_SECONDS
    now = await state(place)
    while now != before and time.monotonic() < until:
        await asyncio.sleep(0.05)
        now = await state(place)
    return now


def _text(draw: random.Random, size: int) -> str:
    """Return about that many characters, which no other prompt begins with."""
    piece = " ".join(draw.choices(_WORDS, k=200))
    return f"{draw.randrange(10**9)} {piece * (size // len(piece) + 1)}"[:size]


def _status(answer: bytes) -> int | None:
    found = _STATUS.match(answer)
    return None if found is None else int(found[1])


def _refusal(answer: bytes) -> str | None:
    """Return the error in a rude visitor's answer: a 5xx."""
    status = _status(answer)
    return _format(answer) if status is not None and status >= 500 else None


def _format(answer: bytes) -> str:
    return ascii(answer[:300])


async def _round(place: Place, *, at_once: int, seed: int, seen: Seen) -> None:
    """Run visitors of all habits, with large requests and a batch at the same time."""
    await asyncio.gather(
        come(place, visits=20 * at_once, at_once=at_once, seed=seed, seen=seen),
        come(place, visits=_NUM_LARGE, at_once=2, seed=seed, seen=seen, habits=LARGE),
        run_batch(place, seed, seen),
    )


async def soak(place: Place, *, minutes: float, at_once: int, seed: int) -> bool:
    """Run visitors for some seconds, print the remaining resources, and return whether none are."""
    seen = Seen()
    before = await state(place)
    begun = time.monotonic()
    sizes: list[int] = []
    rounds, looked = 0, begun
    while time.monotonic() < begun + 60 * minutes or len(sizes) < _LEAST_LOOKS:
        await _round(place, at_once=at_once, seed=seed + rounds, seen=seen)
        rounds += 1
        passed = (time.monotonic() - begun) / 60
        caches_fill = not sizes and passed < min(1.0, minutes / 4)
        if caches_fill or time.monotonic() < looked + min(_LOOK_SECONDS, 6 * minutes):
            continue
        await settled(place, before)
        await asyncio.sleep(_PAUSE_SECONDS)
        looked = time.monotonic()
        sizes.append(await asyncio.to_thread(tree_bytes, place.pid))
        print(f"{passed:6.1f} min {seen.visits.total():8,} visits {sizes[-1] / 2**20:8.1f} MiB")
    after = await settled(place, before)
    growth = max(sizes[-3:]) / sizes[0]
    print(f"visits: {dict(seen.visits)}")
    print(f"held before: {before}")
    print(f"held after:  {after}")
    print(f"memory at the end over that when caches were full: {growth:.3f}")
    for fault, count in seen.faults.most_common(20):
        print(f"FAULT {count} x {fault}")
    return after == before and not seen.faults and growth <= _ALLOWED_GROWTH


def main() -> int:
    """Soak a new server; return 1 if resources were left or errors occurred."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--visitors", type=int, default=32, help="run N visitors at once (default: 32)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, default=demo.MODEL_PATH)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(
            *("--model", str(arguments.model), "--served-model-name", demo.NAME),
            *("--kv-cache-memory", _KV_CACHE, "--data-dir", str(Path(folder) / "data")),
            log=Path(folder) / "log",
        ) as place,
    ):
        is_clean = asyncio.run(
            soak(
                place,
                minutes=arguments.minutes,
                at_once=arguments.visitors,
                seed=arguments.seed,
            )
        )
    print("nothing was left" if is_clean else "NOT clean: see above")
    return 0 if is_clean else 1


if __name__ == "__main__":
    raise SystemExit(main())
