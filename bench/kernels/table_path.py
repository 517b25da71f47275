"""Tables on the host: rows/s of rendering requests and of writing results, and memory.

    python -m bench.kernels.table_path [--rows 10000 1000000] [--kinds chat jinja vectors]

Each kind and length runs in a fresh process pinned to one core. A Parquet table of such rows is
rendered as a file of requests, then rows of results (made beforehand) are written next to its
columns as Parquet: a short answer each, or a vector of 384 numbers. `jinja` has an expression in
its template. Each is compared with a program written by hand, with pyarrow and json alone. Prints a
markdown table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .host_path import peak_bytes

KINDS = ("chat", "jinja", "vectors")
_DIMENSIONS = 384
_BATCH_ROWS = 8_192
_MIB = 2**20
_SYSTEM = "You are a helpful assistant who answers briefly."
_PROMPTS = {"chat": "Of {{ text }}: where is it?", "jinja": "Of {{ text | upper }}?"}


def write_input(path: Path, num_rows: int) -> None:
    """Write a Parquet table of questions, batch by batch."""
    schema = pa.schema([("id", pa.int64()), ("text", pa.string()), ("stars", pa.float64())])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, num_rows, 2**17):
            numbers = range(start, min(start + 2**17, num_rows))
            texts = [f"the capital of country number {number}" for number in numbers]
            columns = [pa.array(numbers), pa.array(texts), pa.array([0.5] * len(texts))]
            writer.write_table(pa.table(columns, schema=schema))


def write_rows(path: Path, num_rows: int, kind: str) -> None:
    """Write the rows of results in a run's format."""
    vectors = np.random.default_rng(0).standard_normal((64, _DIMENSIONS)).astype(np.float32)
    texts = [b64encode(vector.tobytes()).decode() for vector in vectors]
    with path.open("wb") as file:
        for number in range(num_rows):
            usage = {"prompt_tokens": 20, "completion_tokens": 2, "total_tokens": 22}
            message = {"role": "assistant", "content": "Paris."}
            choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
            body: dict[str, Any] = {"id": "x", "choices": choices, "usage": usage}
            if kind == "vectors":
                data = [{"index": 0, "object": "embedding", "embedding": texts[number % 64]}]
                body = {"id": "x", "data": data, "usage": usage}
            response = {"status_code": 200, "request_id": "r", "body": body}
            row = {"id": "b", "custom_id": str(number), "response": response, "error": None}
            file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")


def measure_here(folder: Path, kind: str) -> list[float]:
    """Return the seconds of rendering and writing, and of both by hand, and the peak memory."""
    source, rows = folder / "in.parquet", folder / "rows.jsonl"
    by_us = seconds_of(lambda: run_product(source, rows, folder / "out.parquet", kind))
    peak = peak_bytes()
    by_hand = seconds_of(lambda: run_by_hand(source, rows, folder / "hand.parquet", kind))
    return [*by_us, *by_hand, peak]


def seconds_of(run: Callable[[], float]) -> list[float]:
    """Return the seconds of both halves of a function that returns the start of the second."""
    started = time.perf_counter()
    between = run()
    return [between - started, time.perf_counter() - between]


def run_product(source: Path, rows: Path, target: Path, kind: str) -> float:
    """Render the requests and write the table."""
    from tidemill.batch.table.recipe import parse_recipe
    from tidemill.offline.files.table_output import write_table
    from tidemill.offline.files.table_requests import open_requests

    given: dict[str, Any] = {"prompt": _PROMPTS.get(kind, "{{ text }}"), "id": "id"}
    given |= {"url": "/v1/embeddings"} if kind == "vectors" else {"system": _SYSTEM}
    recipe = parse_recipe(given)
    with ExitStack() as stack:
        requests = open_requests(
            str(source),
            recipe,
            "parquet",
            tmp_dir=source.parent,
            max_line_bytes=2**25,
            stack=stack,
        )
        between = time.perf_counter()
        assert requests.table is not None
        write_table(requests.table, rows, target, "parquet")
    return between


def run_by_hand(source: Path, rows: Path, target: Path, kind: str) -> float:
    """Do the same as a short user program."""
    requests = source.with_name("requests.jsonl")
    url = "/v1/embeddings" if kind == "vectors" else "/v1/chat/completions"
    with requests.open("w") as file:
        for batch in pq.ParquetFile(source).iter_batches(_BATCH_ROWS):
            for row in batch.to_pylist():
                user = {"role": "user", "content": f"Of {row['text']}: where is it?"}
                body: dict[str, Any] = {"messages": [{"role": "system", "content": _SYSTEM}, user]}
                if kind == "vectors":
                    body = {"input": row["text"], "encoding_format": "base64"}
                line = {"custom_id": str(row["id"]), "url": url, "body": body}
                file.write(json.dumps(line) + "\n")
    between = time.perf_counter()
    with rows.open() as file, ExitStack() as stack:
        writer = None
        for batch in pq.ParquetFile(source).iter_batches(_BATCH_ROWS):
            bodies = [json.loads(next(file))["response"]["body"] for _ in range(batch.num_rows)]
            if kind == "vectors":
                answers: list[Any] = [
                    np.frombuffer(b64decode(body["data"][0]["embedding"]), np.float32)
                    for body in bodies
                ]
            else:
                answers = [body["choices"][0]["message"]["content"] for body in bodies]
            usages = [body["usage"] for body in bodies]
            columns = {name: batch.column(name) for name in batch.schema.names}
            table = pa.table(columns | {"answer": answers, "usage": usages})
            if writer is None:
                made = pq.ParquetWriter(target, table.schema, compression="zstd")
                writer = stack.enter_context(made)
            writer.write_table(table)
    requests.unlink()
    return between


def measure(num_rows: int, kind: str) -> str:
    """Measure a kind in a fresh process on one core and return its row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        write_input(Path(folder) / "in.parquet", num_rows)
        write_rows(Path(folder) / "rows.jsonl", num_rows, kind)
        process = subprocess.run(
            [sys.executable, "-m", "bench.kernels.table_path", "--one", folder, "--kinds", kind],
            cwd=Path(__file__).parents[2],
            check=True,
            capture_output=True,
            text=True,
        )
    ours, written, by_hand, written_by_hand, peak = map(float, process.stdout.split())
    return (
        f"| {kind} | {num_rows:,} | {num_rows / ours:,.0f} | {by_hand / ours:.2f} | "
        f"{num_rows / written:,.0f} | {written_by_hand / written:.2f} | {peak / _MIB:.0f} |"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each kind and length and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels.table_path")
    parser.add_argument("--rows", type=int, nargs="+", default=(10_000, 1_000_000))
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=KINDS)
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one is not None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        pa.set_cpu_count(1)
        print(*measure_here(options.one, options.kinds[0]))
        return
    print("| rows | number | requests, rows/s | × by hand | table, rows/s | × by hand | peak MiB |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for kind in options.kinds:
        for num_rows in options.rows:
            print(measure(num_rows, kind), flush=True)


if __name__ == "__main__":
    main()
