"""A server with two engines in separate processes, one of which is killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from bench.server.served import Place, serving
from tidemill import demo

PATIENCE_SECONDS = 60
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]


def children(place: Place) -> list[int]:
    """Return the processes of a server's engines, each of which leads a group."""
    found = []
    for path in Path(f"/proc/{place.pid}/task").glob("*/children"):
        found += [int(child) for child in path.read_text(encoding="ascii").split()]
    return [child for child in found if _leads_group(child)]


def _leads_group(process: int) -> bool:
    try:
        return os.getpgid(process) == process
    except ProcessLookupError:  # it has ended since
        return False


def metric(place: Place, name: str) -> float:
    """Return the value of a metric."""
    [line] = [line for line in place.get("/metrics").splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[1])


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="an engine has a core")
def test_requests_are_answered_although_an_engine_is_killed(tmp_path: Path) -> None:
    """Whole and streamed replies continue; a stop during an engine's restart exits with 0."""
    flags = ("--model", str(demo.MODEL_PATH), "--served-model-name", demo.NAME, "-dp", "2")
    with (
        serving(*flags, log=tmp_path / "log") as place,
        openai.OpenAI(base_url=f"{place.url}/v1", api_key="none", max_retries=0) as client,
    ):

        def answers() -> list[str | None]:
            """Return an answer, and the same one by a streamed response."""
            whole = client.chat.completions.create(
                model=demo.NAME, messages=QUESTION, temperature=0
            )
            events = client.responses.create(
                model=demo.NAME, input=QUESTION, temperature=0, stream=True
            )
            texts = [event.delta for event in events if event.type == "response.output_text.delta"]
            return [whole.choices[0].message.content, "".join(texts)]

        engines = children(place)
        assert len(engines) == 2
        assert answers() == ["Paris", "Paris"]
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not metric(place, "tidemill_output_tokens_total"):  # reported once per second
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.kill(engines[0], signal.SIGKILL)
        assert answers() == ["Paris", "Paris"]
        assert httpx.get(f"{place.url}/health").status_code == 200
        assert engines[0] not in children(place)
