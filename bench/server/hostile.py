"""Latency of `/health` while a server works on large or expensive bodies.

    python -m bench.server.hostile [--model out/bench/46m] [--rounds 3] [--only NAME …]

Starts `tidemill serve` and sends each body `--rounds` times, from another thread, while `/health`
is polled every 10 ms on a separate connection. Prints one line of JSON for each kind of body:
the size, the status, the seconds until its reply, and the median and the maximum of the rounds'
longest `/health` in milliseconds. Goal: 100 ms at 35 MB on two idle cores. The kind `idle` is the
same measurement without a body: on a loaded machine compare with it. `queue` sends six texts of
4 MB to `/tokenize`, then a chat of 30 kB, and measures the chat.
"""

from __future__ import annotations

import argparse
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from statistics import median
from threading import Event

from bench.server.served import Place, serving
from tidemill import demo

CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
_SIZE = 35_000_000
_PAUSE_SECONDS = 0.01
_IDLE_SECONDS = 3.0
_CHAT = b'{"max_tokens":1,"messages":[{"role":"user","content":"'


def _repeated(start: bytes, part: bytes, end: bytes, size: int = _SIZE) -> bytes:
    return start + part * ((size - len(start) - len(end)) // len(part)) + end


def _joined(start: bytes, parts: Iterator[bytes], end: bytes) -> bytes:
    return start + b",".join(parts) + end


def _logprobs(max_tokens: int, **fields: object) -> bytes:
    messages = [{"role": "user", "content": "Hi"}]
    body = {"messages": messages, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": True}
    return json.dumps(body | fields).encode()


BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "ascii": (CHAT, lambda: _repeated(_CHAT, b"word ", b'"}]}')),
    "escapes": (CHAT, lambda: _repeated(_CHAT, rb"\u00e9", b'"}]}')),
    "emoji": (CHAT, lambda: _repeated(_CHAT, "aé😀".encode(), b'"}]}')),
    "quotes": (CHAT, lambda: _repeated(_CHAT, rb"\"", b'"}]}')),
    "spaces": (CHAT, lambda: _repeated(b'{"messages":', b" ", b"1}")),
    "image": (
        CHAT,
        lambda: _repeated(
            b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":'
            b'{"url":"data:image/png;base64,',
            b"AAAA",
            b'"}}]}]}',
        ),
    ),
    "ids": (
        COMPLETIONS,
        lambda: _joined(b'{"prompt":[', (b"%d" % (i % 400) for i in range(2_000_000)), b"]}"),
    ),
    "lists": (
        COMPLETIONS,
        lambda: _joined(b'{"prompt":[', (b"[1,2,3,4,5,6]" for _ in range(250_000)), b"]}"),
    ),
    "messages": (
        CHAT,
        lambda: _joined(
            b'{"messages":[', (b'{"role":"user","content":"%d"}' % i for i in range(250_000)), b"]}"
        ),
    ),
    "strings": (
        COMPLETIONS,
        lambda: _joined(b'{"prompt":[', (b'"%d"' % i for i in range(2_000_000)), b"]}"),
    ),
    "keys": (
        CHAT,
        lambda: _joined(b'{"metadata":{', (b'"k%d":0' % i for i in range(1_000_000)), b"}}"),
    ),
    "bias": (
        CHAT,
        lambda: _joined(
            b'{"messages":[{"role":"user","content":"Hi"}],"logit_bias":{',
            (b'"%d":1' % i for i in range(1_000_000)),
            b"}}",
        ),
    ),
    "tokens": (
        "/detokenize",
        lambda: _joined(b'{"tokens":[', (b"%d" % (i % 400) for i in range(1_000_000)), b"]}"),
    ),
    "text": (TOKENIZE, lambda: _repeated(b'{"prompt":"', b"word ", b'"}', 4_000_000)),
    "broken": (CHAT, lambda: _repeated(_CHAT, rb"\u00e9", b'"}]}') + b"x"),
    "logprobs": (CHAT, lambda: _logprobs(1_500, n=128, top_logprobs=20)),
    "allowed logprobs": (CHAT, lambda: _logprobs(300, n=128, top_logprobs=20)),
}


def post(place: Place, path: str, body: bytes) -> tuple[int, float]:
    """Return the status and the seconds until the whole reply to a body."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {place.host}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with closing(socket.create_connection((place.host, place.port))) as connection:
        begun = time.monotonic()
        connection.sendall(head.encode() + body[:1000])
        connection.sendall(memoryview(body)[1000:])
        first = b""
        while data := connection.recv(2**20):
            first = first or data
        return int(first.split(b" ", 2)[1]) if first else 0, time.monotonic() - begun


def longest_health(place: Place, is_done: Event) -> float:
    """Return the longest seconds of `/health` until an event."""
    request = f"GET /health HTTP/1.1\r\nHost: {place.host}\r\n\r\n".encode()
    longest = 0.0
    with closing(socket.create_connection((place.host, place.port))) as connection:
        while not is_done.wait(_PAUSE_SECONDS):
            begun = time.monotonic()
            connection.sendall(request)
            if not connection.recv(2**16):
                return float("inf")
            longest = max(longest, time.monotonic() - begun)
    return longest


def measured(place: Place, path: str, body: bytes) -> tuple[int, float, float]:
    """Return a body's status and seconds, and the longest `/health` until its reply."""
    is_done = Event()
    with ThreadPoolExecutor(1) as pool:
        health = pool.submit(longest_health, place, is_done)
        try:
            time.sleep(0.1)
            status, seconds = post(place, path, body) if body else (0, _IDLE_SECONDS)
            time.sleep(0.3 if body else _IDLE_SECONDS)
        finally:
            is_done.set()
        return status, seconds, health.result()


def queued(place: Place) -> dict[str, float]:
    """Return the seconds of a chat of 30 kB alone, and after six texts of 4 MB."""
    chat = _repeated(_CHAT, b" " * 10, b'"}]}', 30_000)
    path, make = BODIES["text"]
    text = make()
    _, alone = post(place, CHAT, chat)
    with ThreadPoolExecutor(6) as pool:
        others = [pool.submit(post, place, path, text) for _ in range(6)]
        time.sleep(1)
        _, behind = post(place, CHAT, chat)
        longest = max(other.result()[1] for other in others)
    return {"alone": alone, "behind": behind, "texts": longest}


def main() -> None:
    """Serve, send the bodies and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=["idle", "queue", *BODIES])
    parser.add_argument("--log", type=Path, default=Path("hostile.log"))
    given = parser.parse_args()
    names = given.only or ["idle", *BODIES, "queue"]
    flags = ("--model", given.model) if given.model else ()
    with serving(*flags, log=given.log) as place:
        post(place, CHAT, _logprobs(1))
        for name in names:
            if name == "queue":
                figures = [queued(place) for _ in range(given.rounds)]
                row = {key: median(each[key] for each in figures) for key in figures[0]}
                print(json.dumps({"kind": name, **row}), flush=True)
                continue
            path, make = BODIES.get(name, (CHAT, bytes))
            body = make()
            rounds = [measured(place, path, body) for _ in range(given.rounds)]
            health = [1e3 * each[2] for each in rounds]
            row = {"median_ms": round(median(health)), "max_ms": round(max(health))}
            seconds = round(median(each[1] for each in rounds), 2)
            status = rounds[0][0]
            shown = {"kind": name, "bytes": len(body), "status": status, "seconds": seconds}
            print(json.dumps({**shown, **row}), flush=True)


if __name__ == "__main__":
    assert demo.NAME
    main()
