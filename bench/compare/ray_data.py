"""Rows per second of an engine under Ray Data compared with the same engine alone.

    python -m bench.compare.ray_data [--rows 6000] [--runs 3] [--threads 1] [--max-tokens 24]

Both have an engine of the demo model with the same number of threads, and answer the same table;
they take turns. A rate is that of the rows between the first and the last tenth, by when each block
of 256 is there, so that neither loading nor the end counts. Ray's own processes need a processor
in addition to the engine's threads: without a spare one the figure shows only how busy the machine
is.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterable, Iterator

import pyarrow as pa

_BATCH_ROWS = 64
_BLOCK_ROWS = 4 * _BATCH_ROWS
_PROMPT = "Write a few words about the number {{ id }}."
_MAX_NUM_SEQS = 64


def main() -> None:
    """Print each rate, their medians and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=24)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(given.threads)
    table = pa.table({"id": range(1, given.rows + 1)})
    params = {"temperature": 0, "max_tokens": given.max_tokens, "ignore_eos": True}
    rates: dict[str, list[float]] = {"alone": [], "under Ray": []}
    for run in range(given.runs):
        for name, answered in (("alone", _alone), ("under Ray", _under_ray)):
            rates[name].append(_rate(answered(table, params, given.threads), given.rows))
            print(f"run {run + 1}: {name}: {rates[name][-1]:.1f} rows/s", flush=True)
    alone, under_ray = (statistics.median(each) for each in rates.values())
    print(f"medians: alone {alone:.1f}, under Ray {under_ray:.1f}: {under_ray / alone:.3f}")
    print(f"load of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def _alone(table: pa.Table, params: dict[str, object], threads: int) -> Iterator[int]:
    """Yield the number of rows of each block that an engine of this process answers."""
    del threads  # by the environment
    from tidemill import Engine

    with Engine(max_num_seqs=_MAX_NUM_SEQS) as engine:
        bodies = (
            {"messages": [{"role": "user", "content": _PROMPT.replace("{{ id }}", str(number))}]}
            | params
            for number in table["id"].to_pylist()
        )
        for place, _ in enumerate(engine.answer_many(bodies, progress=False), 1):
            if place % _BLOCK_ROWS == 0 or place == table.num_rows:
                yield (place - 1) % _BLOCK_ROWS + 1


def _under_ray(table: pa.Table, params: dict[str, object], threads: int) -> Iterator[int]:
    """Yield the number of rows of each block from Ray."""
    import ray.data

    import tidemill.ray

    ray.init(address="local", num_cpus=threads + 2, include_dashboard=False, log_to_driver=False)
    try:
        answered = tidemill.ray.answer(
            ray.data.from_arrow(table),
            prompt=_PROMPT,
            params=params,
            num_cpus=threads,
            batch_size=_BATCH_ROWS,
            max_num_seqs=_MAX_NUM_SEQS,
        )
        for batch in answered.iter_batches(batch_size=None, batch_format="pyarrow"):
            assert batch["error"].null_count == batch.num_rows
            yield batch.num_rows
    finally:
        ray.shutdown()


def _rate(blocks: Iterable[int], num_rows: int) -> float:
    """Return the rows per second between the first and the last tenth."""
    count, marks = 0, []
    for rows in blocks:
        count += rows
        if num_rows // 10 <= count <= num_rows - num_rows // 10:
            marks.append((time.perf_counter(), count))
    (start, first), (end, last) = marks[0], marks[-1]
    return (last - first) / (end - start)


if __name__ == "__main__":
    main()
