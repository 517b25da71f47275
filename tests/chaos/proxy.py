"""A proxy between our processes and an emulator that makes AWS fail, by a seed.

    python tests/chaos/proxy.py --target URL --port N --seed N --rate 0.02

A request is refused before it is forwarded, or carried out although its answer is lost, or slow.
Which one, is decided by the seed and the order in which requests come.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import Counter

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

_HOP_HEADERS = {"connection", "keep-alive", "transfer-encoding", "expect"}
_MAX_BODY_BYTES = 64 * 2**20
_SLOW_SECONDS = 0.5


class Proxy:
    """Forwards every request, except for a share `rate` of them that fails."""

    def __init__(self, target: str, seed: int, rate: float) -> None:
        self._target = target
        self._random = random.Random(seed)
        self._rate = rate
        self._session: ClientSession | None = None
        self.counts: Counter[str] = Counter()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Forward one request, or do what went wrong with it."""
        if request.path == "/-/counts":
            return web.json_response(dict(self.counts))
        fault = self._choose()
        self.counts[fault or "none"] += 1
        body = await request.read()
        if fault == "refused":
            return _refusal(request)
        if fault == "slow":
            await asyncio.sleep(_SLOW_SECONDS)
        response = await self._forward(request, body)
        if fault == "lost" and request.transport is not None:
            request.transport.abort()
        return response

    def _choose(self) -> str | None:
        if self._random.random() >= self._rate:
            return None
        return self._random.choice(["refused", "lost", "slow"])

    async def _forward(self, request: web.Request, body: bytes) -> web.Response:
        if self._session is None:
            self._session = ClientSession(
                connector=TCPConnector(limit=0),
                auto_decompress=False,
                timeout=ClientTimeout(total=120),
            )
        headers = {
            name: value
            for name, value in request.headers.items()
            if name.lower() not in _HOP_HEADERS
        }
        async with self._session.request(
            request.method,
            self._target + request.raw_path,
            headers=headers,
            data=body,
            allow_redirects=False,
        ) as answer:
            content = await answer.read()
            kept = [
                (name, value)
                for name, value in answer.headers.items()
                if name.lower() not in _HOP_HEADERS | {"content-length"}
            ]
            response = web.Response(status=answer.status, body=content)
            for name, value in kept:
                if name.lower() != "content-type":
                    response.headers.add(name, value)
            response.headers["Content-Type"] = answer.headers.get("Content-Type", "text/plain")
            if request.method == "HEAD":
                response.headers["Content-Length"] = answer.headers.get("Content-Length", "0")
            return response


def _refusal(request: web.Request) -> web.Response:
    """Return an error that clients of this service recognise."""
    operation = request.headers.get("X-Amz-Target", "")
    if operation.startswith("DynamoDB"):
        kind = "com.amazonaws.dynamodb.v20120810#ProvisionedThroughputExceededException"
        return web.json_response({"__type": kind, "message": "Injected."}, status=400)
    if operation:
        return web.json_response({"__type": "InternalFailure", "message": "Injected."}, status=500)
    text = "<Error><Code>SlowDown</Code><Message>Injected.</Message></Error>"
    return web.Response(status=503, text=text, content_type="application/xml")


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=0.0)
    options = parser.parse_args()
    proxy = Proxy(options.target, options.seed, options.rate)
    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    app.router.add_route("*", "/{path:.*}", proxy.handle)
    web.run_app(app, host="127.0.0.1", port=options.port, print=None, access_log=None)


if __name__ == "__main__":
    main()
