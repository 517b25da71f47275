"""Streams compared with vLLM's server: seconds to the first token, tokens per second, one client.

    python -m bench.server.serve out/bench/46m [--vllm-python PATH] [--at 1 8 32] [--rounds 3]

Each server is started once and measured in turns, so that other load on the machine affects both.
At the end ours gets `--many` streams at once: none may lack an event or have one out of order.
Prints a table and the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shutil import copyfileobj
from statistics import median
from threading import Thread

from bench.compare.peers import MAX_MODEL_LEN, OURS, vllm_environment
from bench.processes import RunFailed, tail
from bench.server.served import serving
from bench.server.streams import Figures, measure

_NAME = "bench"
_REQUESTS_A_STREAM = 8
_READY = b"Application startup complete"
_VLLM = "vLLM"


@contextmanager
def vllm_serving(python: Path, model: str, dtype: str, log: Path, port: int) -> Iterator[str]:
    """Start vLLM's server from an environment that holds its CPU build, and yield its address."""
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--served-model-name", _NAME, "--dtype", dtype, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--max-model-len", str(MAX_MODEL_LEN)]
    command += ["--gpu-memory-utilization", "0.5", "--disable-uvicorn-access-log"]
    with (
        log.open("wb") as held,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **vllm_environment()},
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                held.write(line)
                if _READY in line:
                    break
            else:
                held.flush()
                raise RunFailed(f"vLLM's server did not start.\n{tail(log)}")
            # Output that is not read would fill the pipe and block the server.
            copying = Thread(target=copyfileobj, args=(process.stdout, held), daemon=True)
            copying.start()
            yield f"http://127.0.0.1:{port}"
            process.terminate()
            copying.join()
        finally:
            process.terminate()


def figures_of(url: str, streams: int, seed: int) -> Figures:
    """Return a server's figures for a number of concurrent streams."""
    requests = streams * _REQUESTS_A_STREAM
    figures = asyncio.run(measure(url, _NAME, streams=streams, requests=requests, seed=seed))
    if figures.num_wrong:
        raise RunFailed(f"{url}: {figures.num_wrong} streams are incomplete or out of order")
    return figures


def print_medians(name: str, streams: int, rounds: Sequence[Figures]) -> tuple[float, float]:
    """Print the medians of some rounds, and return seconds to the first token and tokens/s."""
    first = median(one.first_p50 for one in rounds)
    last = median(one.first_p99 for one in rounds)
    rate = median(one.tokens_per_second for one in rounds)
    print(f"{streams:>7}  {name:<10}{1e3 * first:>12.0f}{1e3 * last:>12.0f}{rate:>12.0f}")
    return first, rate


def main() -> None:
    """Start the servers, measure them in turns and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--vllm-python", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--at", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--many", type=int, default=200)
    parser.add_argument("--port", type=int, default=8765, help="set the port of vLLM's server")
    given = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = ("--model", given.model, "--served-model-name", _NAME, "--dtype", given.dtype)
        context = ("--max-model-len", str(MAX_MODEL_LEN))
        ours = stack.enter_context(serving(*flags, *context, log=folder / "ours"))
        urls = {OURS: ours.url}
        if given.vllm_python is not None:
            peer = vllm_serving(
                given.vllm_python, given.model, given.dtype, folder / "vllm", given.port
            )
            urls[_VLLM] = stack.enter_context(peer)
        for url in urls.values():
            figures_of(url, 2, seed=10**6)  # a first request compiles kernels
        print("streams  server    first p50 ms first p99 ms    tokens/s")
        for streams in given.at:
            rounds = {
                name: [figures_of(url, streams, seed) for seed in range(given.rounds)]
                for name, url in urls.items()
            }
            figures = {name: print_medians(name, streams, some) for name, some in rounds.items()}
            if _VLLM in figures:
                (first, rate), (other_first, other_rate) = figures[OURS], figures[_VLLM]
                print(f"{'':>9}{other_first / first:.2f} × to the first token,", end=" ")
                print(f"{rate / other_rate:.2f} × tokens/s")
        figures_of(ours.url, given.many, seed=7)
        print(f"{given.many} streams at once: every event of each, in order")


if __name__ == "__main__":
    main()
