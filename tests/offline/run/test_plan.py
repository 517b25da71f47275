"""Whatever the plan: one row a line, in the order of the file, the same rows."""

from __future__ import annotations

import gzip
import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.offline.given import durable_ids, line, rows
from tidemill.cli.main import main
from tidemill.offline.files.paths import spool_path

Spawn = Callable[..., Any]
Write = Callable[..., Path]


@pytest.mark.parametrize("seed", range(2))
def test_a_killed_run_goes_on_under_another_plan(
    spawn: Spawn, run: Any, write_input: Write, tmp_path: Path, seed: int
) -> None:
    """kill -9 in one order and then another; no row is run twice that was durable."""
    rng = random.Random(seed)
    texts = ["a" * 400, "b" * 400, "c"]
    lines = [
        line(
            str(n),
            wait=0.01 * rng.random(),
            max_tokens=2 ** rng.randrange(8),
            messages=[{"role": "user", "content": rng.choice(texts) + str(n)}],
            **({"status": 400} if n % 6 == 1 else {}),
        )
        for n in range(60)
    ]
    lines[25] = "{"
    source = write_input(*lines)
    flags = ["-i", source, "--on-invalid-line", "skip", "--max-inflight", "4"]
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert run(*flags, "-o", whole, "--no-plan") == 0
    plans = [[], ["--no-plan"]]
    for plan, num_rows in zip(plans, sorted(rng.sample(range(5, 50), 2)), strict=True):
        options = ["--flush-seconds", "0.01"]
        process = spawn(*flags, "-o", out, "--resume", *plan, options=options)
        deadline = time.monotonic() + 120
        while len(durable_ids(out)) < num_rows and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.kill()
        assert process.wait() in {-signal.SIGKILL, 0}
    run.engine, num_durable = None, len(durable_ids(out))
    assert run(*flags, "-o", out, "--resume") == 0
    assert run.engine is None or run.engine.num_requests <= 60 - num_durable
    assert out.read_bytes() == whole.read_bytes()
    assert not spool_path(out).exists()


def test_greedy_rows_are_those_without_plan_and_drafts(write_input: Write, tmp_path: Path) -> None:
    """By the demo model in fp32, of few pages, from a file that is compressed, too."""
    rng = random.Random(4)
    texts = ["Count to ten. " * 40, "Name a colour. " * 40, ""]
    lines = []
    for n in range(60):
        text = rng.choice(texts) + f"What is {rng.randrange(9)} and {rng.randrange(9)}?"
        lines.append(
            line(
                str(n),
                model="tidemill-demo",
                messages=[{"role": "user", "content": text}],
                temperature=0,
                max_tokens=rng.choice((2, 8, 24)),
            )
        )
    source = write_input(*lines)
    packed = tmp_path / "in.jsonl.gz"
    packed.write_bytes(gzip.compress(source.read_bytes(), mtime=0))
    written = []
    for name, given, more in (
        ("plain", source, "--no-plan --no-speculative-decoding"),
        ("planned", source, "--kv-cache-memory 4M"),
        ("packed", packed, ""),
    ):
        out = tmp_path / name
        flags = ["--dtype", "float32", "--device", "cpu", "--max-num-seqs", "8", *more.split()]
        assert main(["run", "-i", str(given), "-o", str(out), *flags]) == 0
        # `created` is the time of the file.
        answers = [row["response"]["body"] | {"created": 0} for row in rows(out)]
        written.append([json.dumps(body) for body in answers])
    assert len(written[0]) == 60
    assert written[0] == written[1] == written[2]
