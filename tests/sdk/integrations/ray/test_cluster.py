"""A cluster that loses a node, an actor and an engine: each row once, as `tidemill run` has it."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tidemill

pytest.importorskip("ray", reason="the extra `ray` is not installed")

import ray

import tidemill.ray

# Ray's own code warns of files, sockets and names of its past.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

NUM_ROWS = 600
_ROW = re.compile(r"^Row \d+: ")
RECIPE = """prompt = "Write a line about {{ city }}."
id = "id"
params = {max_tokens = 64, ignore_eos = true}
"""
ENGINE: dict[str, Any] = {"max_num_seqs": 8, "dtype": "float32"}
SEEDS = range(10) if os.environ.get("TIDEMILL_CHAOS_SEEDS") == "all" else range(1)


@pytest.fixture(scope="module")
def table() -> pa.Table:
    """Return a table whose ids are the numbers of its rows; a row of it fails."""
    cities = ["Paris", "Rome", "Oslo", "Lima"]
    names: list[str | None] = [f"{cities[number % 4]} {number}" for number in range(NUM_ROWS)]
    names[7] = None
    return pa.table({"id": range(1, NUM_ROWS + 1), "city": names})


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a recipe file, whose rows are drawn at random."""
    path = tmp_path_factory.mktemp("recipe") / "in.recipe.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def expected(table: pa.Table, recipe: Path) -> list[dict[str, Any]]:
    """Return the rows of `tidemill run`."""
    pq.write_table(table, recipe.with_name("in.parquet"))
    done = tidemill.run(
        recipe.with_name("in.parquet"), on_invalid_line="skip", progress=False, **ENGINE
    )
    rows = pq.read_table(done.output).to_pylist()
    # A row of a dataset has no number to be called by.
    return [row | {"error": row["error"] and _ROW.sub("", row["error"])} for row in rows]


@pytest.mark.parametrize("seed", SEEDS)
def test_each_row_is_there_once_whatever_dies(
    seed: int, cluster: Any, table: pa.Table, recipe: Path, expected: list[dict[str, Any]]
) -> None:
    """A node, an actor's process and an engine's process, at rows that the seed chooses."""
    rng = random.Random(seed)
    ray.data.DataContext.get_current().wait_for_min_actors_s = 600
    ds = ray.data.from_arrow(table).repartition(60)
    answered = tidemill.ray.answer(ds, recipe, batch_size=8, engines=3, **ENGINE)
    places = sorted(rng.sample(range(1, NUM_ROWS // 4), 3))
    deeds = dict(zip(places, rng.sample([remove_node, kill_actor, kill_engine], 3), strict=True))
    found = []
    for number, row in enumerate(answered.iter_rows()):
        if number in deeds:
            deeds[number](cluster, rng)
        found.append(row)
    assert all(row.pop("reasoning") is None for row in found)
    by_id = sorted(found, key=lambda row: row["id"])
    assert [row["id"] for row in by_id] == list(range(1, NUM_ROWS + 1))
    assert [pair for pair in zip(by_id, expected, strict=True) if pair[0] != pair[1]] == []


def remove_node(cluster: Any, rng: random.Random) -> None:
    """Take a node away at once, with all that runs there."""
    cluster.remove_node(rng.choice(sorted(cluster.worker_nodes, key=id)), allow_graceful=False)


def kill_actor(_: Any, rng: random.Random) -> None:
    """Kill the process of an actor."""
    os.kill(rng.choice(processes("ray::MapWorker(MapBatches(TableActor")), signal.SIGKILL)


def kill_engine(_: Any, rng: random.Random) -> None:
    """Kill an engine while it works, and see its actor end.

    It is the oldest of a live actor: one that dies while it loads ends a dataset.
    """
    del rng
    actors = processes("ray::MapWorker(MapBatches(TableActor")
    engines = processes("tidemill.offline.engine.process")
    oldest = min((pid for pid in engines if parent_of(pid) in actors), key=start_of)
    actor = parent_of(oldest)
    os.kill(oldest, signal.SIGKILL)
    deadline = time.monotonic() + 120
    while command_of(actor):
        assert time.monotonic() < deadline, "the actor goes on without its engine"
        time.sleep(0.05)


def processes(words: str) -> list[int]:
    """Return the ids of this process's descendants whose command has these words."""
    return [pid for pid in sorted(descendants(os.getpid())) if words in command_of(pid)]


def descendants(pid: int) -> Iterator[int]:
    """Yield the processes that a process has started, and theirs."""
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(word) for word in tasks.read_text().split()]
        except OSError:  # it has ended
            continue
        for child in children:
            yield child
            yield from descendants(child)


def parent_of(pid: int) -> int:
    """Return the id of a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def start_of(pid: int) -> int:
    """Return when a process has started, in ticks since the machine has."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def command_of(pid: int) -> str:
    """Return a process's command; empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
