"""Calls that a page of rows waits for, in a large batch whose bucket and table are simulated."""

from __future__ import annotations

import pytest

from bench.cloud.row_pages import Cloud, batch_of, queries
from tidemill.batch.model import Shard
from tidemill.dashboard.row_query import RowQuery
from tidemill.handler.queries.part_cache import PartCache
from tidemill.handler.queries.results import shards_behind
from tidemill.handler.queries.row_requests import read_requests
from tidemill.handler.queries.row_search import search_rows

NUM_ROWS = 1_000_000
# Rounds of a first page, whose indexes and rows are read at once, and of the same page again.
ROUNDS = {
    "failed, first page": (2, 1),
    "truncated, first page": (3, 1),
    "all, in the middle": (2, 1),
    "one line": (2, 1),
    "text, no match": (7, 4),
}


@pytest.fixture(scope="module", name="cloud")
def fixture_cloud() -> Cloud:
    """Return a cloud that answers at once."""
    return Cloud(NUM_ROWS, 0.0)


@pytest.mark.parametrize("name", ROUNDS)
def test_calls_are_concurrent(cloud: Cloud, name: str) -> None:
    """A page waits for few calls; its bytes do not grow with the batch."""
    query = queries(NUM_ROWS)[name]
    batch, cache = batch_of(cloud, NUM_ROWS), PartCache()
    for num_rounds in ROUNDS[name]:
        cloud.reset()
        found = search_rows(cloud, cloud.deployment, batch, cache, query, limit=25)
        assert cloud.num_rounds == num_rounds
        assert cloud.num_bytes < 20e6
        assert found.rows or query.text


def test_requests_that_follow_each_other_are_read_at_once(cloud: Cloud) -> None:
    """The lines of a shard are counted once."""
    batch, cache = batch_of(cloud, NUM_ROWS), PartCache()
    lines = range(NUM_ROWS // 2, NUM_ROWS // 2 + 25)
    for num_calls in (2, 1):
        cloud.reset()
        found = read_requests(cloud, cloud.deployment, batch, cache, lines)
        assert list(found) == list(lines)
        assert cloud.num_calls == num_calls


def test_a_piece_of_a_download_reads_little_more_than_its_rows(cloud: Cloud) -> None:
    """Nothing is read together with the indexes of many shards."""
    cloud.reset()
    args = cloud, cloud.deployment, batch_of(cloud, NUM_ROWS), PartCache(), RowQuery()
    found = search_rows(*args, limit=20_000, max_bytes=3 * 2**20)
    assert sum(len(row or b"") for _, row in found.rows) >= 3 * 2**20
    assert cloud.num_bytes < 5e6


def test_shards_are_found_wherever_they_are() -> None:
    """Shards with few and with many lines follow a line as they do in a list of all shards."""
    cloud = Cloud(1, 0.0)
    sizes, first = [1] * 300 + [400] * 100 + [3] * 500, 1
    cloud.shards.clear()
    for number, num_rows in enumerate(sizes):
        cloud.shards.append(Shard("batch", number, first, num_rows, first, first + num_rows))
        first += num_rows + number % 2  # some lines are blank
    batch = batch_of(cloud, sum(sizes))
    ends = [shard.first_line - 1 for shard in cloud.shards[1:]] + [None]
    whole = [*zip(cloud.shards, ends, strict=True)]
    for after in (0, 1, 299, 450, 451, 20_000, 40_000, 41_700, 41_900, first - 2, first):
        found = [*shards_behind(cloud, cloud.deployment, batch, PartCache(), after)]
        assert found == [each for each in whole if each[1] is None or each[1] > after]
