"""Decisions by a file of ours and by vLLM's server, in turns: rows/s with one and eight questions.

    python -m bench.decisions.questions out/bench/46m [--vllm-python PATH] [--rows 400] \
        [--runs 3] [--dtype bfloat16] [--quantization int8]

A row is a text of 430 tokens, with yes/no questions of about 45 tokens with their wrapping. Ours:
one question, eight with the row first, eight with the questions first, and the same as chats with
`max_tokens` 1. vLLM's server has no files of decisions: a client sends the rows, with `--at`
requests at once, and the best rate counts. Prints medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from bench.compare import peers
from bench.compare.compare import machine
from bench.compare.peers import Job
from bench.processes import RunFailed, measure
from bench.server.serve import vllm_serving
from bench.workloads import Texts, words_of

NUM_QUESTIONS = 8
ROW_WORDS = words_of(430)
QUESTION_WORDS = 12
SERVED = "bench"
_ASK = "Answer only with Yes or No."
_PORT = 18_431


def bodies(
    num_rows: int, num_questions: int, layout: str, run: int = 0
) -> Iterator[dict[str, Any]]:
    """Yield the body of each row; `layout` may be `chats`. The rows of each `run` are others."""
    texts = Texts()
    questions = [f"Is it true that {texts(QUESTION_WORDS)[:-1]}?" for _ in range(NUM_QUESTIONS)]
    for _ in range(num_rows):
        state = f"{run} {texts(ROW_WORDS)}"
        if layout == "chats":
            for question in questions[:num_questions]:
                content = f"{state}\n\nQuestion: {question}\n{_ASK}"
                yield {
                    "model": SERVED,
                    "messages": [{"role": "user", "content": content}],
                    "max_tokens": 1,
                    "temperature": 0,
                    "logprobs": True,
                    "top_logprobs": 5,
                }
            continue
        questions_by_name = {
            f"q{number}": {"type": "noul", "instructions": question}
            for number, question in enumerate(questions[:num_questions])
        }
        ours = {} if layout == "peer" else {"question_layout": layout}
        yield {"model": SERVED, "state": state, "questions": questions_by_name, **ours}


def write_file(path: Path, num_rows: int, num_questions: int, layout: str) -> None:
    """Write the rows as a batch file."""
    url = "/v1/chat/completions" if layout == "chats" else "/v1/systemone"
    with path.open("w", encoding="utf-8") as sink:
        for number, body in enumerate(bodies(num_rows, num_questions, layout)):
            line = {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": body}
            sink.write(json.dumps(line) + "\n")


def ours_per_second(job: Job, num_rows: int, flags: list[str], folder: Path) -> float:
    """Run a file once, as a user does; return rows per second."""
    peer = peers.tidemill(job)
    rows = folder / "rows.jsonl"
    rows.unlink(missing_ok=True)
    command = [*peer.command, *flags, "-o", str(rows)]
    measured = measure(command, peer.environment, peer.marks, folder / "log")
    return num_rows / measured.steady_seconds


def theirs_per_second(url: str, num_rows: int, num_questions: int, at_once: int, run: int) -> float:
    """Send the rows to a server with `at_once` requests in flight; return rows per second."""

    async def send() -> float:
        waiting = iter(list(bodies(num_rows, num_questions, "peer", run)))
        async with httpx.AsyncClient(timeout=600) as client:

            async def work() -> None:
                for body in waiting:
                    answer = await client.post(f"{url}/v1/systemone", json=body)
                    if answer.status_code != httpx.codes.OK:
                        raise RunFailed(answer.text)

            started = time.monotonic()
            async with asyncio.TaskGroup() as group:
                for _ in range(at_once):
                    group.create_task(work())
            return num_rows / (time.monotonic() - started)

    return asyncio.run(send())


def main() -> None:
    """Compare, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="use this folder of a model")
    parser.add_argument(
        "--vllm-python", type=Path, help="use this interpreter with vLLM's CPU build"
    )
    parser.add_argument("--rows", type=int, default=400, help="run N rows (%(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="run each N times (%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="use this dtype (%(default)s)")
    parser.add_argument("--quantization", help="quantize our weights, for example to int8")
    parser.add_argument(
        "--at", type=int, nargs="+", default=[16, 64, 256], help="requests of vLLM's client at once"
    )
    arguments = parser.parse_args()
    flags = ["--quantization", arguments.quantization] if arguments.quantization else []
    kinds = [(1, "row_first"), (NUM_QUESTIONS, "row_first"), (NUM_QUESTIONS, "questions_first")]
    kinds += [(1, "chats"), (NUM_QUESTIONS, "chats")]
    rates: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="tidemill-bench-") as name:
        folder = Path(name)
        for _ in range(arguments.runs):
            for count, layout in kinds:
                path = folder / f"{count}-{layout}.jsonl"
                write_file(path, arguments.rows, count, layout)
                job = Job(arguments.model, path, SERVED, arguments.dtype, arguments.rows)
                rate = ours_per_second(job, arguments.rows, flags, folder)
                note(rates, f"{count}, {layout}", rate)
            if arguments.vllm_python is None:
                continue
            with vllm_serving(
                arguments.vllm_python, arguments.model, arguments.dtype, folder / "vllm", _PORT
            ) as url:
                for count in (1, NUM_QUESTIONS):
                    theirs_per_second(url, 32, count, 16, -1)
                    # Other rows each time, which its prefix cache does not know.
                    best = max(
                        theirs_per_second(url, arguments.rows, count, at_once, run)
                        for run, at_once in enumerate(arguments.at)
                    )
                    note(rates, f"{count}, vLLM", best)
    print("| questions | rows/s | lowest to highest |\n|---|---:|---:|")
    for kind, figures in rates.items():
        median = statistics.median(figures)
        print(f"| {kind} | {median:.1f} | {min(figures):.1f} to {max(figures):.1f} |")
    print(machine() + ".")


def note(rates: dict[str, list[float]], kind: str, rate: float) -> None:
    """Record a rate, and print it at once."""
    rates.setdefault(kind, []).append(rate)
    print(f"{kind}: {rate:.1f} rows/s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
