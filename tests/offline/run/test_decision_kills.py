"""Decisions after kill -9: the file is completed to the bytes of an undisturbed run."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.offline.given import durable_ids
from tidemill import demo

NUM_LINES, NUM_KILLS = 90, 10
CHOICES = [{"value": name} for name in ("travel", "money", "weather", "food")]


def write_decisions(path: Path) -> None:
    """Write decisions of both URLs about texts of different lengths, some of which begin alike."""
    rng = random.Random(6)
    lines = []
    for number in range(NUM_LINES):
        state = "It rains in Oslo. " * rng.choice((1, 4, 16)) + f"Row {rng.randrange(100)}."
        body: dict[str, Any] = {
            "model": demo.NAME,
            "input": state,
            "questions": [
                {"type": "predicate", "instructions": "Is a city named?"},
                {"type": "choice", "instructions": "Which subject?", "choices": CHOICES},
            ],
        }
        url = "/v1/decisions"
        if number % 4 == 0:
            questions = {"city": {"type": "noul", "instructions": "Is a city named?"}}
            url, body = (
                "/v1/systemone",
                {"model": demo.NAME, "state": state, "questions": questions},
            )
        lines.append(json.dumps({"custom_id": f"c{number}", "url": url, "body": body}))
    path.write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.long
def test_ten_kills_at_random_moments_leave_the_bytes_of_an_undisturbed_run(tmp_path: Path) -> None:
    """Each run is killed soon after some more rows are durable, and the next one goes on."""
    source, out, whole = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "whole.jsonl"))
    write_decisions(source)
    command = [sys.executable, "-m", "tidemill", "run", "-i", str(source), "--no-card"]
    command += ["--dtype", "float32", "--device", "cpu", "--max-num-seqs", "4"]
    subprocess.run([*command, "-o", str(whole)], check=True, timeout=600)
    rng, moments = random.Random(7), []
    for _ in range(NUM_KILLS):
        num_rows = len(durable_ids(out)) + rng.randrange(1, 5)
        process = subprocess.Popen([*command, "-o", str(out), "--resume"])
        while len(durable_ids(out)) < num_rows and process.poll() is None:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.1))
        process.kill()
        if process.wait() == -signal.SIGKILL:
            moments.append(len(durable_ids(out)))
    assert len(set(moments)) > 1, "too few kills hit a running file"
    subprocess.run([*command, "-o", str(out), "--resume"], check=True, timeout=600)
    assert out.read_bytes() == whole.read_bytes()
    assert whole.read_bytes().count(b"\n") == NUM_LINES
