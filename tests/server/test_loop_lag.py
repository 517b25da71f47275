"""Event loop lag: its measurement, and its limits for malicious bodies."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.engine.scripted_model import Scene
from tidemill.batch.file.lines import RawLine
from tidemill.batch.file.run_line import run_line
from tidemill.server.loop_lag import LoopLag

MESSAGES = [{"role": "user", "content": "Hi"}]
MAX_TURN_SECONDS = 0.05


def schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a body that requests JSON of a schema."""
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def named(number: int, value: Any) -> dict[str, Any]:
    """Return this number of identical properties."""
    return {f"p{i}": value for i in range(number)}


HOSTILE: dict[str, dict[str, Any]] = {
    "a product of automata": schema({"allOf": [{"multipleOf": n} for n in (9973, 9967)]}),
    "as many states as are served": schema({"type": "integer", "multipleOf": 19_997}),
    "joined patterns": schema({"allOf": [{"pattern": f"a{i}|b{i}"} for i in range(100)]}),
    "patterns": schema({"properties": named(1_000, {"pattern": "^[a-z]{2,40}-[0-9]+$"})}),
    "properties": schema({"properties": named(4, {"properties": named(1_000, {})})}),
    "long lists": schema({"properties": named(500, {"type": "array", "maxItems": 1_000})}),
    "alternatives": schema({"anyOf": [{"properties": {f"k{i}": {}}} for i in range(1_000)]}),
    "values": schema({"enum": [f"value {i}" for i in range(20_000)]}),
    "nested": schema(json.loads('{"items":' * 49 + "{}" + "}" * 49)),
    "choices": {"guided_choice": [f"choice {i}" for i in range(10_000)]},
    "an expression": {"guided_regex": "(a|b|c)?" * 1_200},
    "expressions that end a text": {"stop_regex": ["(a|b)*a(a|b){200}c"] * 4},
    "joined terms": {"grammar": "start: T\nT: " + " & ".join(f"/.*{i}.*/" for i in range(30))},
    "rules": {"ebnf": "".join(f'r{i} ::= r{i + 1} | "{i}"\n' for i in range(900)) + 'r900 ::= "a"'},
    "a long text": {"messages": [{"role": "user", "content": "é word " * 200_000}]},
    "many messages": {"messages": MESSAGES * 5_000},
    "many values": {"metadata": {f"k{i}": [] for i in range(20_000)}},
    "an image": {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 8_000_000}}
    ]}]},
}  # fmt: skip


@pytest.fixture
def _without_garbage() -> None:
    """Exempt the objects of earlier tests from garbage collection, as a run does after loading.

    They stay exempt, so that a collection scans imported modules once, not for each body.
    """
    gc.collect()
    gc.freeze()


async def longest_turn(body: dict[str, Any]) -> float:
    """Return the longest turn of the loop while an engine answers two lines with a body.

    It is measured in CPU seconds of the loop's thread, so that other processes do not count.
    """
    line = {"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": MESSAGES, **body}}
    data, served, turns = json.dumps(line).encode(), Scene().served, list[float]()

    async def measure() -> None:
        while True:
            begun = time.thread_time()
            await asyncio.sleep(0.001)
            turns.append(time.thread_time() - begun)

    measuring = asyncio.create_task(measure())
    raws = [RawLine(number, data) for number in range(2)]
    await asyncio.gather(*(run_line(raw, served, created=0) for raw in raws))
    await asyncio.sleep(0.002)
    measuring.cancel()
    return max(turns)


@pytest.mark.usefixtures("_without_garbage")
@pytest.mark.parametrize("what", HOSTILE)
async def test_no_body_blocks_the_loop_for_long(what: str) -> None:
    """Small malicious bodies are limited too."""
    assert await longest_turn(HOSTILE[what]) <= MAX_TURN_SECONDS


async def test_a_long_turn_is_recorded_as_lag() -> None:
    """The histogram contains its whole length."""
    lag = LoopLag()
    async with lag.measured():
        await asyncio.sleep(0)
        time.sleep(0.2)  # noqa: ASYNC251 - what is measured
        await asyncio.sleep(0.06)
    assert lag.longest > 0.1


def test_lags_are_exported_as_a_histogram() -> None:
    """Buckets are cumulative."""
    lag, registry = LoopLag(), CollectorRegistry(auto_describe=False)
    registry.register(lag)
    for seconds in (0.0005, 0.001, 0.3, 20):
        lag.observe(seconds)
    lines = generate_latest(registry).decode().splitlines()
    for line in (
        'tidemill_loop_lag_seconds_bucket{le="0.001"} 2.0',
        'tidemill_loop_lag_seconds_bucket{le="0.25"} 2.0',
        'tidemill_loop_lag_seconds_bucket{le="0.5"} 3.0',
        'tidemill_loop_lag_seconds_bucket{le="+Inf"} 4.0',
        "tidemill_loop_lag_seconds_count 4.0",
        "tidemill_loop_lag_seconds_sum 20.3015",
    ):
        assert line in lines
